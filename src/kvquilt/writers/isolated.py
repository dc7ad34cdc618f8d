from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvquilt.identity import digest_fields, encode_ids
from kvquilt.model.language_model import LanguageModel, RowCounter
from kvquilt.segment import CompiledSegment, prefix_digest

_BATCH_TOKENS = 512  # a CPU is saturated by then; padding beyond it only costs memory
_PADDING = 1.15  # padded tokens per real token that a batch may cost


@dataclass(frozen=True, slots=True)
class Isolated:
    """Each segment encoded alone, or behind a short shared prefix whose rows are dropped.

    A prefix takes the attention sink that a segment's first tokens otherwise become (Block-Attention, APE,
    CacheBlend's demonstration encode so); a prompt that begins with the same prefix makes its first document exact.
    """

    prefix: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        return digest_fields("kvquilt 2026-11 writer isolated v1", [("prefix", encode_ids(self.prefix))])

    @property
    def encoded_behind(self) -> tuple[int, ...]:
        return self.prefix

    def compile(
        self, model: LanguageModel, segments: Sequence[tuple[int, ...]], counter: RowCounter | None = None
    ) -> Iterator[tuple[int, CompiledSegment]]:
        start, digest = len(self.prefix), prefix_digest(self.prefix)
        behind = model.encode(torch.tensor([self.prefix]), counter=counter) if self.prefix else None
        try:
            for batch in _batches([len(s) for s in segments]):
                width = max(len(segments[i]) for i in batch)
                ids = torch.zeros(len(batch), width, dtype=torch.int64)
                for row, i in enumerate(batch):
                    ids[row, : len(segments[i])] = torch.tensor(segments[i])
                cache = model.encode(ids, behind, counter)
                try:
                    for row, i in enumerate(batch):
                        rows = slice(start, start + len(segments[i]))
                        # a copy: the segment outlives the batch, and a view would keep all of it in memory
                        keys = cache.slot_keys[:, row, :, rows].clone(memory_format=torch.contiguous_format).cpu()
                        values = cache.slot_values[:, row, :, rows].clone(memory_format=torch.contiguous_format).cpu()
                        yield i, CompiledSegment(segments[i], keys, values, start, digest)
                finally:
                    model.pool.release(cache)
        finally:
            if behind is not None:
                model.pool.release(behind)


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
