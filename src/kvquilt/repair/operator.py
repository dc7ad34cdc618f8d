"""The one operator: place stored segments into slots, compute the chosen rows, return the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan, SlotView
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement
from kvquilt.repair.scene import joined
from kvquilt.segment import CompiledSegment, place


def assemble(
    model: LanguageModel, placement: Placement, segments: Mapping[int, CompiledSegment], capacity: int
) -> SlotCache:
    """A request-private cache with each segment of `segments` (run index -> segment) at its run's slots.

    Keys are rotated once, from the stored frame. Slots of other runs hold garbage until `repair` computes them. The
    caller gives the cache back to `model.pool`.
    """
    cache = model.pool.acquire(capacity)
    try:
        positions = placement.positions
        with torch.inference_mode():
            for index, segment in segments.items():
                span = placement.extent(index)
                keys = cache.slot_keys[:, 0, :, span.start : span.stop]
                place(segment, positions[index], model.capability.tables, keys)
                cache.slot_values[:, 0, :, span.start : span.stop].copy_(segment.values)
        cache.view = placement.view()
    except BaseException:
        model.pool.release(cache)
        raise
    return cache


def repair(
    model: LanguageModel,
    cache: SlotCache,
    ids: Sequence[int],
    rows: Sequence[range] | RowPlan,
    logits: int = 1,
    counter: RowCounter | None = None,
) -> torch.Tensor:
    """Compute `rows` of the tokens `ids` over the slots of `cache` and return logits ``[logits, vocabulary]`` fp32.

    Every slot that is seen and not computed must already hold keys. With all rows this is full prefill, with the
    inline rows alone pure reuse. A contiguous tail is written as a slice, with no gather.

    Args:
        ids: one per slot.
        rows: ascending, disjoint slot ranges, computed in every layer, or a whole plan; the last row is the last
            token's.
        logits: how many of the last rows to return logits for.
    """
    plan = rows if isinstance(rows, RowPlan) else RowPlan(joined(rows), len(ids), view=cache.view)
    tokens = torch.tensor(ids, dtype=torch.int64)
    return model.portions(tokens[plan.rows][None], plan, cache, logits, counter)[0]


def compact(model: LanguageModel, cache: SlotCache, kept: torch.Tensor, capacity: int) -> SlotCache:
    """A cache with the slots `kept` (``[K]`` int64, ascending) of `cache` one behind the other; `cache` is released.

    They keep their logical positions, so the cache is shorter than the prompt, and its next position is not.
    """
    view = cache.view
    small = model.pool.acquire(capacity)
    try:
        where = kept.to(model.device)
        small.slot_keys[:, :, :, : len(kept)] = cache.slot_keys[:, :, :, where]
        small.slot_values[:, :, :, : len(kept)] = cache.slot_values[:, :, :, where]
        positions = kept if view is None else view.at(kept)
        small.view = SlotView(positions, int(positions[-1]) + 1 - len(kept))
        small.parts = cache.parts
    except BaseException:
        model.pool.release(small)
        raise
    model.pool.release(cache)
    return small
