"""Prompts that have been read once, and what they are asked then: their answers, and how likely they find others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import torch

from kvquilt.accounting import counted_flops, full_flops
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.batch import forward_together
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
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
        ledger: of reading; `answers` adds what it decodes. Its seconds have ``first_token``, from the placed prompt on,
            and ``processor``, what all threads of the process spent of it.
        read: slots of the prompt; those behind are free for `room` tokens.
    """

    model: LanguageModel
    cache: SlotCache
    logits: torch.Tensor
    ledger: Ledger
    read: int


def answers(prompts: Sequence[Standing], tokens: int) -> list[tuple[int, ...]]:
    """Greedy answers of at most `tokens`, with the end token where it was reached; decoded step by step together.

    A ledger's seconds of decoding are its share of the steps it took part in.
    """
    said = [[int(prompt.logits[-1].argmax())] for prompt in prompts]
    counters, seconds = [RowCounter() for _ in prompts], [0.0] * len(prompts)
    with _as_they_were(prompts):
        while going := [
            n for n, ids in enumerate(said) if len(ids) < tokens and ids[-1] not in prompts[n].model.stop_ids
        ]:
            began = perf_counter()
            steps = _forward([prompts[n] for n in going], [said[n][-1:] for n in going], [counters[n] for n in going])
            for n, logits in zip(going, steps, strict=True):
                said[n].append(int(logits[-1].argmax()))
                seconds[n] += (perf_counter() - began) / len(going)
    for prompt, counter, taken in zip(prompts, counters, seconds, strict=True):
        prompt.ledger.seconds["decode"] = taken
        prompt.ledger.forward_tokens["decode"] += counter.rows
        prompt.ledger.token_layers += counter.token_layers
    return [tuple(ids) for ids in said]


def force(prompts: Sequence[Standing], ids: Sequence[int]) -> list[torch.Tensor]:
    """Log-probabilities ``[ids, vocabulary]`` fp32 before each of `ids`, at least one, as if they were every answer.

    All in one forward, so that what differs between two prompts is their caches alone.
    """
    follow = list(ids[:-1])
    rows = [[prompt.logits[-1:]] for prompt in prompts]
    if follow:
        with _as_they_were(prompts):
            for own, logits in zip(rows, _forward(prompts, [follow] * len(prompts)), strict=True):
                own.append(logits)
    return [torch.cat(own).log_softmax(-1) for own in rows]


def _forward(
    prompts: Sequence[Standing], ids: Sequence[Sequence[int]], counters: Sequence[RowCounter] | None = None
) -> list[torch.Tensor]:
    """Those with the same trained parts go together."""
    groups: dict[int, list[int]] = {}
    for n, prompt in enumerate(prompts):
        groups.setdefault(id(prompt.cache.parts), []).append(n)
    out: dict[int, torch.Tensor] = {}
    for group in groups.values():
        caches, given = [prompts[n].cache for n in group], [ids[n] for n in group]
        counted = None if counters is None else [counters[n] for n in group]
        out.update(zip(group, forward_together(prompts[group[0]].model, given, caches, counted), strict=True))
    return [out[n] for n in range(len(prompts))]


@contextmanager
def _as_they_were(prompts: Sequence[Standing]) -> Iterator[None]:
    views = [prompt.cache.view for prompt in prompts]
    try:
        yield
    finally:
        for prompt, view in zip(prompts, views, strict=True):
            prompt.cache.filled, prompt.cache.view = prompt.read, view


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
