"""Answers and streams: the decode loop, and the live cache behind an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import GEN_CREATED, getgeneratorstate
from typing import TYPE_CHECKING

import torch

from kvquilt.decode import Detokeniser, Sampling, StopStrings
from kvquilt.errors import ConversationError
from kvquilt.ledger import Ledger
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.slots import SlotCache
from kvquilt.model.turns import UnwantedError

if TYPE_CHECKING:
    from kvquilt.engine import Engine


@dataclass(eq=False, slots=True)
class Live:
    """The cache behind a finished answer.

    Attributes:
        pending: answer tokens that are not in the cache yet.
    """

    cache: SlotCache | None
    pending: list[int]
    tenant: str | None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def drop(self) -> SlotCache | None:
        """Hand over the cache, or ``None`` if it is gone: of two threads only one gets it."""
        with self._lock:
            cache, self.cache = self.cache, None
        return cache

    def take(self) -> SlotCache:
        """Hand over the cache, once.

        Raises:
            ConversationError: it was released to make room, or another follow-up has it.
        """
        cache = self.drop()
        if cache is None:
            raise ConversationError(
                "this answer's live cache is gone: it was continued already, or released to make room for a newer "
                "answer; ask again with the documents, or raise Engine(conversations=...)"
            )
        return cache


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer.

    Attributes:
        text: without stop strings and control tokens.
        token_ids: the generated tokens, without the end-of-answer token.
        stop_reason: ``end`` (the model ended), ``stop`` (a stop string), ``length`` or ``cancelled``.
        prompt_tokens: tokens of the prompt, the whole conversation included.
    """

    text: str
    token_ids: tuple[int, ...]
    ledger: Ledger
    stop_reason: str
    prompt_tokens: int
    _engine: Engine = field(repr=False, compare=False)
    _live: Live = field(repr=False, compare=False)

    def explain(self) -> str:
        """The ledger as a table: which document was reused, which not, and why not."""
        return self.ledger.table()

    def take_cache(self) -> SlotCache:
        """The live cache behind this answer, handed over once; give it back to the model's pool.

        Raises:
            ConversationError: it is gone.
        """
        return self._live.take()

    def follow_up(
        self,
        question: str,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        """Ask the next question of this conversation from its live cache; the options are those of `Engine.ask`.

        Raises:
            ConversationError: the live cache is gone.
        """
        return self.stream_follow_up(
            question, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
            stop=stop,
        ).result()  # fmt: skip

    def stream_follow_up(
        self,
        question: str,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Stream:
        """`follow_up`, streamed. A live cache that is gone raises with the first piece."""
        sampling = self._engine.sampling(
            max_new_tokens, stop, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )
        return self._engine.continue_from(self._live, self.ledger, self.prompt_tokens, question, sampling)


class Stream:
    """Text pieces of an answer as they come; `answer` afterwards.

    Nothing is computed before the first piece is asked for. Closing or leaving the stream early cancels it: the cache
    is given back at once and `answer` holds what came so far. Also a context manager. One thread iterates; any may
    cancel.
    """

    def __init__(
        self,
        engine: Engine,
        read: Callable[[], tuple[torch.Tensor, SlotCache]],
        sampling: Sampling,
        ledger: Ledger,
        tenant: str | None,
        begun: Callable[[], object] = lambda: None,
    ) -> None:
        self._unread = Answer("", (), ledger, "cancelled", 0, engine, Live(None, [], tenant))
        self._ended: list[Answer] = []
        # a function, not a method: a generator that held this object would outlive it until the next collection,
        # and with it the cache of a stream that was merely dropped
        self._cancelled = threading.Event()
        self._pieces = _decode(engine, read, sampling, ledger, tenant, self._ended, self._cancelled, begun)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stop now and give everything back; harmless when already finished.

        While another thread is computing the next piece, it returns at once and that thread stops at its next token, or
        before the next portion of the prompt.
        """
        self._cancelled.set()
        unread = getgeneratorstate(self._pieces) == GEN_CREATED
        try:
            self._pieces.close()
        except ValueError:  # another thread is inside: it sees the flag
            return
        if unread:
            self._ended.append(self._unread)

    @property
    def answer(self) -> Answer:
        """The answer, once the stream has ended or was cancelled.

        Raises:
            ConversationError: it has not ended yet, or failed.
        """
        if not self._ended:
            raise ConversationError("the stream has not ended: iterate it to the end, or cancel it")
        return self._ended[0]

    def result(self) -> Answer:
        """Run to the end and return the answer."""
        for _ in self:
            pass
        return self.answer


def _decode(
    engine: Engine,
    read: Callable[[], tuple[torch.Tensor, SlotCache]],
    sampling: Sampling,
    ledger: Ledger,
    tenant: str | None,
    ended: list[Answer],
    cancelled: threading.Event,
    begun: Callable[[], object],
) -> Generator[str, None, None]:
    """Read the prompt, then decode token by token until the end or until `cancelled` is set.

    The answer is appended to `ended` unless something failed.
    """
    model = engine.model
    began = time.perf_counter()
    generator, text, stops = sampling.generator(), Detokeniser(model.tokenizer), StopStrings(sampling.stop)
    try:
        with model.turns.wanted(cancelled.is_set):
            logits, cache = read()
    except UnwantedError:
        if not cancelled.is_set():  # it is what the caller does that nobody wants any more
            raise
        ended.append(Answer("", (), ledger, "cancelled", 0, engine, Live(None, [], tenant)))
        return
    read_slots, prompt_tokens = cache.filled, sum(ledger.tokens.values())
    ids: list[int] = []
    pieces: list[str] = []
    counter = RowCounter()
    reason = "cancelled"
    try:
        token = sampling.pick(logits[-1], generator)
        ledger.seconds["first_token"] = ledger.seconds.get("prompt", 0.0) + time.perf_counter() - began
        with engine.steps.stream(cache):
            begun()
            while not cancelled.is_set():
                if token in model.stop_ids:
                    reason = "end"
                    break
                ids.append(token)
                piece = stops.push(text.push(token))
                if piece:
                    pieces.append(piece)
                    yield piece
                if stops.hit or len(ids) == sampling.max_new_tokens:
                    reason = "stop" if stops.hit else "length"
                    break
                with ledger.stage("decode"):
                    token = sampling.pick(engine.steps.step(cache, token, counter), generator)
        if reason in ("end", "length"):
            rest = stops.push(text.flush()) + stops.flush()
            if rest:
                pieces.append(rest)
                yield rest
    except GeneratorExit:
        reason = "cancelled"
        raise
    except BaseException:
        reason = "failed"
        raise
    finally:
        ledger.forward_tokens["decode"] += counter.rows
        ledger.token_layers += counter.token_layers
        ledger.seconds["total"] = ledger.seconds.get("prompt", 0.0) + time.perf_counter() - began
        pending = ids[cache.filled - read_slots :]
        live = Live(cache, pending, tenant)
        if reason in ("cancelled", "failed"):
            model.pool.release(live.take())
        else:
            engine.keep(live)
        if reason != "failed":
            ended.append(Answer("".join(pieces), tuple(ids), ledger, reason, prompt_tokens, engine, live))


def step(model: LanguageModel, cache: SlotCache, token: int, counter: RowCounter | None = None) -> torch.Tensor:
    """Write one token into the next slot and return the logits behind it, ``[vocabulary]``."""
    return model.forward(torch.tensor([[token]]), cache.tail(1), cache, 1, counter)[0, -1]
