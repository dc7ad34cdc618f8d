"""The same requests through the simulator and through a real engine's reader and memory tier, at small scale."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvquilt.errors import InputError
from kvquilt.evaluation.studies.hit_rate import simulate
from kvquilt.evaluation.studies.hit_rate_model import ModelSize
from kvquilt.evaluation.studies.hit_rate_trace import Trace, Traffic, draw
from kvquilt.evaluation.tasks.help_topics import HelpTopics
from kvquilt.ledger import Ledger
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Document, Inline, Prompt, segment_ids
from kvquilt.repair.presets import METHODS
from kvquilt.store import Store
from kvquilt.tokens import encoder

if TYPE_CHECKING:
    from kvquilt.engine import Engine

SMALL = Traffic(
    requests=40, documents=16, per_request=4, systems=2, system_tokens=16, stamp_tokens=8, question_tokens=12,
    shortest=20, mean=40, longest=80,
)  # fmt: skip
_FLOPS = ModelSize("", 1, 1, 1, 1, 1, 1)  # nothing is said of work here


@dataclass(frozen=True, slots=True)
class Replayed:
    """Token hit rates of the same requests.

    Attributes:
        prompt_tokens: of all requests. `capacity`: tokens that the memory tier could hold, of `segments` in all.
        real_evictions: what the tier counted.
    """

    requests: int
    prompt_tokens: int
    segments: int
    capacity: int
    simulated: float
    real: float
    evictions: int
    real_evictions: int

    @property
    def apart(self) -> float:
        """In points."""
        return 100 * abs(self.simulated - self.real)

    def as_dict(self) -> dict[str, Any]:
        names = ("requests", "prompt_tokens", "segments", "capacity", "simulated", "real")
        told = {name: getattr(self, name) for name in (*names, "evictions", "real_evictions")}
        return told | {"points_apart": round(self.apart, 6)}


def replay(
    engine: Engine,
    traffic: Traffic = SMALL,
    share: float = 0.4,
    progress: Callable[[int, int], object] | None = None,
) -> Replayed:
    """Read every prompt by pure reuse over a memory tier of its own; the engine's store is not touched.

    Texts are made of the standard library's help topics, about as long as `traffic` says; the simulator gets the
    lengths that the model's tokenizer gives them.

    Args:
        share: of all segments' tokens that the tier can hold.

    Raises:
        InputError: a share out of its range. ContextLengthError: a prompt does not fit.
    """
    if not 0 < share <= 1:
        raise InputError("share", "must be above 0 and at most 1", share)
    made = _Texts(engine, draw(traffic))
    trace = made.trace()
    tokens = int(trace.lengths.sum() + trace.system_lengths.sum())
    capacity = int(share * tokens)
    model = engine.model
    told = simulate(trace, "segments:store", capacity, _FLOPS, model.bytes_per_token)
    with Store.open(None, capacity * model.bytes_per_token) as store:
        reader = replace(engine.reader, store=store, _notebooks={})
        longest = int(trace.prompt_tokens.argmax())
        reader.check(made.placement(longest), METHODS["none"], None, 1)
        hits = []
        for n in range(traffic.requests):
            ledger = Ledger()
            _, cache = reader.read(made.placement(n), METHODS["none"], None, ledger, 1)
            model.pool.release(cache)
            hits.append(sum(use.tokens for use in ledger.documents if use.source == "memory"))
            if progress is not None:
                progress(n + 1, traffic.requests)
        evicted = store.stats()["memory"].evictions
    total = int(trace.prompt_tokens.sum())
    rate = sum(hits) / total
    return Replayed(
        traffic.requests, total, tokens, capacity, told.token_hit_rate, rate, told.evictions, evicted
    )  # fmt: skip


class _Texts:
    """Prompts of a trace."""

    def __init__(self, engine: Engine, drawn: Trace) -> None:
        self._drawn, self._tokenizer = drawn, engine.model.tokenizer
        self._encode = encoder(self._tokenizer).encode
        sentences = HelpTopics().sentences("train")
        self._words = sorted({w for s in sentences for w in s.split() if w.isascii() and w.isalpha()})
        self._documents = [self._document(f"document {n}", t) for n, t in enumerate(drawn.lengths.tolist())]
        self._systems = [self._document(f"system {n}", t) for n, t in enumerate(drawn.system_lengths.tolist())]

    def placement(self, request: int) -> Placement:
        return place_runs(self._prompt(request).runs(self._tokenizer))

    def trace(self) -> Trace:
        """The drawn trace with the lengths that the texts have."""
        drawn = self._drawn
        lengths = np.array([len(segment_ids(d, self._tokenizer)) for d in self._documents])
        systems = np.array([len(segment_ids(d, self._tokenizer)) for d in self._systems])
        inline = [
            sum(len(run.ids) for run in self.placement(n).runs if run.document is None)
            for n in range(len(drawn.systems))
        ]
        return Trace(
            drawn.times, drawn.systems, drawn.stamps, drawn.documents, lengths, systems,
            np.zeros_like(drawn.stamp_tokens), np.array(inline),
        )  # fmt: skip

    def _prompt(self, request: int) -> Prompt:
        drawn = self._drawn
        stamp = Inline(f"Tick {drawn.stamps[request]}.\n")
        question = Inline(self._text(f"Question {request}:", int(drawn.question_tokens[request])))
        documents = [self._documents[n] for n in drawn.documents[request].tolist()]
        return Prompt([self._systems[drawn.systems[request]], stamp, *documents, question])

    def _document(self, name: str, tokens: int) -> Document:
        return Document(self._text(f"{name}:", tokens), id=name)

    def _text(self, opening: str, tokens: int) -> str:
        """`opening` and words, about so many tokens."""
        text, left = opening, tokens - len(self._encode(opening))
        for word in self._drawn_words(opening):
            left -= len(self._encode(f" {word}"))
            if left < 0:
                break
            text += f" {word}"
        return text

    def _drawn_words(self, opening: str) -> Iterator[str]:
        drawing = random.Random(opening)  # of the text itself, so that one request more changes none before
        while True:
            yield drawing.choice(self._words)
