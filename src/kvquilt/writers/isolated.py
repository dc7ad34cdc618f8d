from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvquilt.errors import InputError
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.model.language_model import LanguageModel, RowCounter
from kvquilt.model.rows import RowPlan, Watchers
from kvquilt.model.slots import SlotCache
from kvquilt.segment import CompiledSegment, prefix_digest
from kvquilt.writers.extra import Extra
from kvquilt.writers.prefix_cache import PrefixCache

_BATCH_TOKENS = 512  # a CPU is saturated by then; padding beyond it only costs memory
_PADDING = 1.15  # padded tokens per real token that a batch may cost


@dataclass(frozen=True, slots=True)
class Isolated:
    """Each segment encoded alone, or behind a prefix whose rows are dropped.

    A short shared prefix takes the attention sink that a segment's first tokens otherwise become (Block-Attention,
    APE, CacheBlend's demonstration encode so); a prompt that begins with the same prefix makes its first document
    exact. A long one holds other documents: the segment is then encoded in their context.

    Attributes:
        extras: what is noted beside keys and values. Segments are then compiled one by one.

    Raises:
        InputError: two extras note something under one name.
    """

    prefix: tuple[int, ...] = ()
    extras: tuple[Extra, ...] = ()

    def __post_init__(self) -> None:
        names = [name for extra in self.extras for name in extra.names]
        if len(set(names)) < len(names):
            raise InputError("extras", "each notes something of its own", sorted(names))

    @property
    def digest(self) -> str:
        prefix = ("prefix", encode_ids(self.prefix))
        if not self.extras:
            return digest_fields("kvquilt 2026-11 writer isolated v1", [prefix])
        extras = ("extras", "".join(sorted(extra.digest for extra in self.extras)))
        return digest_fields("kvquilt 2026-11 writer isolated with extras v1", [prefix, extras])

    @property
    def encoded_behind(self) -> tuple[int, ...]:
        return self.prefix

    @property
    def side(self) -> frozenset[str]:
        return frozenset(name for extra in self.extras for name in extra.names)

    def compile(
        self, model: LanguageModel, segments: Sequence[tuple[int, ...]], counter: RowCounter | None = None
    ) -> Iterator[tuple[int, CompiledSegment]]:
        with PrefixCache(model, counter) as prefix:
            yield from self.compile_behind(prefix, segments)

    def compile_behind(
        self, prefix: PrefixCache, segments: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[int, CompiledSegment]]:
        """`compile` with a prefix cache that other writers use before and after."""
        if self.extras:
            for i, ids in enumerate(segments):
                yield i, self._observed(prefix, ids)
            return
        model = prefix.model
        behind = prefix.reach(self.prefix) if self.prefix and segments else None
        for batch in _batches([len(s) for s in segments]):
            width = max(len(segments[i]) for i in batch)
            padded = torch.zeros(len(batch), width, dtype=torch.int64)
            for row, i in enumerate(batch):
                padded[row, : len(segments[i])] = torch.tensor(segments[i])
            cache = model.encode(padded, behind, prefix.counter)
            try:
                for row, i in enumerate(batch):
                    yield i, _cut(cache, row, segments[i], self.prefix)
            finally:
                model.pool.release(cache)

    def _observed(self, prefix: PrefixCache, ids: tuple[int, ...]) -> CompiledSegment:
        """One segment, computed in the prefix's own slots, with what the extras note."""
        model, start = prefix.model, len(self.prefix)
        seen = [extra.observe(self.prefix, ids) for extra in self.extras]
        stop = start + len(ids)
        cache = prefix.reach(self.prefix, len(ids) + max(each.room for each in seen))
        last = model.capability.layers - 1
        plan = RowPlan(torch.arange(start, stop), stop, until=last, queries=True, watcher=Watchers(seen))
        model.forward(torch.tensor([ids]), plan, cache, 0, prefix.counter)
        prefix.append(ids)
        side: dict[str, torch.Tensor] = {}
        for each in seen:
            side |= each.side(model, cache, prefix.counter)
            cache.filled = stop
        return _cut(cache, 0, ids, self.prefix, side)


def _cut(
    cache: SlotCache,
    row: int,
    ids: tuple[int, ...],
    prefix: tuple[int, ...],
    side: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> CompiledSegment:
    rows = slice(len(prefix), len(prefix) + len(ids))
    # a copy: the segment outlives the batch, and a view would keep all of it in memory
    keys = cache.slot_keys[:, row, :, rows].clone(memory_format=torch.contiguous_format).cpu()
    values = cache.slot_values[:, row, :, rows].clone(memory_format=torch.contiguous_format).cpu()
    return CompiledSegment(ids, keys, values, len(prefix), prefix_digest(prefix), side)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices grouped by similar length, so that little is padded."""
    batch: list[int] = []
    real = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = lengths[i] * (len(batch) + 1)
        if batch and (padded > _BATCH_TOKENS or padded > _PADDING * (real + lengths[i])):
            yield batch
            batch, real = [], 0
        batch.append(i)
        real += lengths[i]
    if batch:
        yield batch
