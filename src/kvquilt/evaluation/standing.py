"""A prompt that has been read once, and what is asked of it then: its answer, and how likely it finds others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import torch

from kvquilt.accounting import counted_flops, full_flops
from kvquilt.answer import step
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.language_model import LanguageModel, RowCounter
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement
from kvquilt.repair.operator import repair
from kvquilt.repair.presets import Method

if TYPE_CHECKING:
    from kvquilt.engine import Engine


@dataclass(frozen=True, eq=False, slots=True)
class Standing:
    """A prompt in its cache. Whatever is asked of it, the next question finds it as it was.

    Attributes:
        logits: ``[1, vocabulary]`` of the prompt's last row.
        ledger: of reading; `answer` adds what it decodes. Its seconds have ``first_token``, from the placed prompt on,
            and ``processor``, what all threads of the process spent of it.
        read: slots of the prompt; those behind are free for `room` tokens.
    """

    model: LanguageModel
    cache: SlotCache
    logits: torch.Tensor
    ledger: Ledger
    read: int

    def answer(self, tokens: int) -> tuple[int, ...]:
        """The greedy answer of at most `tokens`, with the end token where it was reached."""
        counter, ids = RowCounter(), [int(self.logits[-1].argmax())]
        began = perf_counter()
        with self._as_it_was():
            while len(ids) < tokens and ids[-1] not in self.model.stop_ids:
                ids.append(int(step(self.model, self.cache, ids[-1], counter).argmax()))
        self.ledger.seconds["decode"] = perf_counter() - began
        self.ledger.forward_tokens["decode"] += counter.rows
        self.ledger.token_layers += counter.token_layers
        return tuple(ids)

    def force(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities ``[ids, vocabulary]`` fp32 before each of `ids`, at least one, as if they were the answer.

        All in one forward, for every arm, so that what differs between two arms is the prompt's cache alone.
        """
        steps, follow = [self.logits[-1:]], list(ids[:-1])
        if follow:
            with self._as_it_was():
                plan = self.cache.tail(len(follow))
                steps.append(self.model.forward(torch.tensor([follow]), plan, self.cache, len(follow))[0])
        return torch.cat(steps).log_softmax(-1)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        view = self.cache.view
        try:
            yield
        finally:
            self.cache.filled, self.cache.view = self.read, view


@contextmanager
def reading(
    engine: Engine, placement: Placement, method: Method, tenant: str | None, room: int, in_parts: bool = False
) -> Iterator[Standing]:
    """Read the prompt by `method`; its cache goes back when the context ends.

    Args:
        room: tokens that answers may have.
        in_parts: two forwards, cut where a document begins, instead of the one of full prefill: the same by theory,
            and different by rounding. `method` must be full prefill.

    Raises:
        InputError: the method's budget cannot pay for its probe.
        NumericsError: the model produced NaN.
    """
    model, ledger = engine.model, Ledger(method=method.name, model=engine.model.name, threads=engine.model.threads)
    began, processor = perf_counter(), process_time()
    if in_parts:
        logits, cache = _in_parts(model, placement, ledger, room)
    else:
        logits, cache = engine.reader.read(placement, method, tenant, ledger, room)
    try:
        int(logits[-1].argmax())  # waits for an accelerator
        ledger.seconds["first_token"] = perf_counter() - began
        ledger.seconds["processor"] = process_time() - processor
        yield Standing(model, cache, logits, ledger, cache.filled)
    finally:
        model.pool.release(cache)


def _in_parts(model: LanguageModel, placement: Placement, ledger: Ledger, room: int) -> tuple[torch.Tensor, SlotCache]:
    ids, n, counter = placement.ids, placement.tokens, RowCounter()
    documents = placement.documents()
    at = documents[len(documents) // 2] if documents else len(placement.runs) - 1
    cut = placement.starts[at] or n // 2  # a prompt of one run is cut in its middle
    cache = model.pool.acquire(n + room)
    try:
        with ledger.stage("read"):
            repair(model, cache, ids[:cut], [range(cut)], 0, counter)
            logits = repair(model, cache, ids, [range(cut, n)], 1, counter)
    except BaseException:
        model.pool.release(cache)
        raise
    ledger.forward_tokens["read"] += counter.rows
    ledger.token_layers += counter.token_layers
    ledger.flops += counted_flops(model, counter)
    ledger.flops_full += full_flops(model, n)
    for run in placement.runs:
        ledger.tokens[Provenance.INLINE if run.document is None else Provenance.RECOMPUTED] += len(run.ids)
    return logits, cache
