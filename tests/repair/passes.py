"""One repair pass over placed documents, and what it left in the slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement
from kvquilt.repair.operator import assemble, repair
from kvquilt.repair.plan import row_plan
from kvquilt.repair.scene import joined
from kvquilt.repair.selector import Choice
from kvquilt.writers.isolated import Isolated
from tests.repair.tokenwise import Slots

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def placed(model: LanguageModel, placement: Placement, prefix: Sequence[int] = ()) -> SlotCache:
    """Every document encoded behind `prefix` in its slots; all others hold NaN until something computes them."""
    at = placement.documents()
    writer = Isolated(tuple(prefix))
    segments = {at[n]: s for n, s in writer.compile(model, [placement.runs[i].ids for i in at])}
    cache = assemble(model, placement, segments, placement.tokens)
    held = torch.zeros(cache.capacity, dtype=torch.bool)
    for i in at:
        held[placement.span(i).start : placement.span(i).stop] = True
    cache.slot_keys[:, :, :, ~held] = float("nan")
    cache.slot_values[:, :, :, ~held] = float("nan")
    return cache


def passed(
    model: LanguageModel,
    placement: Placement,
    plans: Sequence[RowPlan | Sequence[range]],
    logits: int = 1,
    *,
    prefix: Sequence[int] = (),
    change: Callable[[SlotCache], None] | None = None,
    counter: RowCounter | None = None,
) -> tuple[torch.Tensor, Slots]:
    """The plans one after the other: logits ``[logits, vocabulary]`` of the last one, and all slots afterwards.

    Args:
        change: done to the slots before the first plan.
    """
    cache = placed(model, placement, prefix)
    try:
        if change is not None:
            change(cache)
        for plan in plans[:-1]:
            repair(model, cache, placement.ids, plan, 0, counter)
        out = repair(model, cache, placement.ids, plans[-1], logits, counter)
        n = placement.tokens
        pairs = zip(cache.slot_keys[:, 0, :, :n].clone(), cache.slot_values[:, 0, :, :n].clone(), strict=True)
        return out, list(pairs)
    finally:
        model.pool.release(cache)


def inline_spans(placement: Placement) -> list[range]:
    return [placement.span(i) for i, run in enumerate(placement.runs) if run.document is None]


def document_slots(placement: Placement) -> torch.Tensor:
    """``[n]`` int64, ascending."""
    return joined([placement.span(i) for i in placement.documents()])


def computed(placement: Placement, sets: Sequence[set[int]]) -> torch.Tensor:
    """``[layers, tokens]`` bool: of each layer the inline rows, and the document rows of these numbers."""
    out = torch.zeros(len(sets), placement.tokens, dtype=torch.bool)
    out[:, joined(inline_spans(placement))] = True
    slots = document_slots(placement)
    for layer, those in enumerate(sets):
        out[layer, slots[sorted(those)]] = True
    return out


def plan_of(computed: torch.Tensor, **options: object) -> RowPlan:
    """The plan that computes ``[layers, tokens]`` bool."""
    rows = computed.any(0).nonzero()[:, 0]
    active = {n: torch.searchsorted(rows, layer.nonzero()[:, 0]) for n, layer in enumerate(computed)}
    active = {n: those for n, those in active.items() if len(those) != len(rows)}
    return RowPlan(rows, computed.shape[1], active=active, **options)  # type: ignore[arg-type]


def with_rows(placement: Placement, those: torch.Tensor, layers: int = 3) -> RowPlan:
    """The plan of inline rows and the document rows ``those`` in all layers."""
    return row_plan(joined(inline_spans(placement)), layers, Choice(those), those, placement.tokens, None, None)


def same_slots(one: Slots, other: Slots, tolerance: float = 1e-4) -> bool:
    """Every layer's keys and values are close, relative to the largest."""
    for pair, others in zip(one, other, strict=True):
        for a, b in zip(pair, others, strict=True):
            if not float((a - b).abs().max()) <= tolerance * float(b.abs().max()):  # NaN fails
                return False
    return True
