from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan, Watchers
from kvquilt.segment import CompiledSegment
from kvquilt.writers.batches import compile_batches, cut_segment
from kvquilt.writers.extra import Extra
from kvquilt.writers.prefix_cache import PrefixCache


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
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

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
        yield from compile_batches(prefix, self.prefix, segments)

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
        return cut_segment(cache, 0, ids, self.prefix, side)
