"""Padded batches of segments through the compile pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from kvquilt.model.parts import PLAIN, Parts
from kvquilt.model.slots import SlotCache
from kvquilt.segment import CompiledSegment, prefix_digest
from kvquilt.writers.prefix_cache import PrefixCache

_BATCH_TOKENS = 512  # a CPU is saturated by then; padding beyond it only costs memory
_PADDING = 1.15  # padded tokens per real token that a batch may cost


def compile_batches(
    prefix: PrefixCache, behind: tuple[int, ...], segments: Sequence[tuple[int, ...]], parts: Parts = PLAIN
) -> Iterator[tuple[int, CompiledSegment]]:
    """Compile segments behind the ids `behind`, which the plain model reads, with `parts` on for the segments alone.

    Args:
        segments: ids of the rows, soft ones among them.
    """
    model = prefix.model
    start = prefix.reach(behind) if behind and segments else None
    # one by one where they can go along with steps of streams, as rows of a batch cannot
    ride = model.rides.stepping(parts) and not model.turns.mine
    for batch in batches([len(s) for s in segments], 1 if ride else _BATCH_TOKENS):
        cache = model.encode(padded([segments[i] for i in batch]), start, prefix.counter, parts)
        try:
            for row, i in enumerate(batch):
                yield i, cut_segment(cache, row, segments[i], behind)
        finally:
            model.pool.release(cache)


def padded(segments: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """``[segments, longest]`` int64, padded to the right."""
    out = torch.zeros(len(segments), max(map(len, segments)), dtype=torch.int64)
    for row, ids in enumerate(segments):
        out[row, : len(ids)] = torch.tensor(ids)
    return out


def cut_segment(
    cache: SlotCache,
    row: int,
    ids: tuple[int, ...],
    behind: tuple[int, ...],
    side: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> CompiledSegment:
    """The segment `ids` that stands behind `behind` in one row of the batch."""
    rows = slice(len(behind), len(behind) + len(ids))
    # a copy: the segment outlives the batch, and a view would keep all of it in memory
    keys = cache.slot_keys[:, row, :, rows].clone(memory_format=torch.contiguous_format).cpu()
    values = cache.slot_values[:, row, :, rows].clone(memory_format=torch.contiguous_format).cpu()
    return CompiledSegment(ids, keys, values, len(behind), prefix_digest(behind), side)


def batches(lengths: Sequence[int], tokens: int = _BATCH_TOKENS) -> Iterator[list[int]]:
    """Indices grouped by similar length, so that little is padded; `tokens` at most where there are several."""
    batch: list[int] = []
    real = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = lengths[i] * (len(batch) + 1)
        if batch and (padded > tokens or padded > _PADDING * (real + lengths[i])):
            yield batch
            batch, real = [], 0
        batch.append(i)
        real += lengths[i]
    if batch:
        yield batch
