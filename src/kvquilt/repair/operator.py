"""The one operator: place stored segments into slots, compute the chosen rows, return the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvquilt.model.language_model import LanguageModel, RowCounter
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement
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
        with torch.inference_mode():
            for index, segment in segments.items():
                span = placement.span(index)
                keys = cache.slot_keys[:, 0, :, span.start : span.stop]
                place(segment, span.start, model.capability.tables, keys)
                cache.slot_values[:, 0, :, span.start : span.stop].copy_(segment.values)
    except BaseException:
        model.pool.release(cache)
        raise
    return cache


def repair(
    model: LanguageModel,
    cache: SlotCache,
    ids: Sequence[int],
    rows: Sequence[range],
    logits: int = 1,
    counter: RowCounter | None = None,
) -> torch.Tensor:
    """Compute `rows` of the prompt `ids` over the slots of `cache` and return logits ``[logits, vocabulary]`` fp32.

    Every slot outside `rows` must already hold keys. With all rows this is full prefill, with the inline rows alone
    pure reuse. A contiguous tail is written as a slice, with no gather.

    Args:
        rows: ascending, disjoint slot ranges; the last one ends at the last token.
        logits: how many of the last rows to return logits for.
    """
    index = torch.cat([torch.arange(r.start, r.stop) for r in rows])
    chosen = torch.tensor(ids, dtype=torch.int64)[index][None]
    out = model.forward(chosen, RowPlan(index, len(ids)), cache, logits, counter)
    return out[0]
