"""Keys and values of what segments are encoded behind: one prefix at a time, shared by all that begin with it."""

from __future__ import annotations

from itertools import takewhile
from types import TracebackType

import torch

from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import Pair, RowPlan
from kvquilt.model.slots import SlotCache


class PrefixCache:
    """A context manager that keeps one prefix in slots; going to another, only what differs is computed.

    Attributes:
        ids: what the slots hold.
    """

    def __init__(self, model: LanguageModel, counter: RowCounter | None = None) -> None:
        self.model, self.counter = model, counter
        self.ids: tuple[int, ...] = ()
        self._cache: SlotCache | None = None

    def reach(self, ids: tuple[int, ...], room: int = 0) -> SlotCache:
        """Slots filled with just `ids`, batch of one, with room for `room` more; they stay this object's own."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.ids, ids, strict=False)))
        if self._cache is None:
            self._cache = self.model.pool.acquire(len(ids) + room)
        self.ids, self._cache.filled = ids[:same], same
        self._cache = self.model.pool.grow(self._cache, len(ids) + room)
        if same < len(ids):
            plan = RowPlan(torch.arange(same, len(ids)), len(ids), until=self.model.capability.layers - 1)
            self.model.portions(torch.tensor([ids[same:]]), plan, self._cache, 0, self.counter)
            self.ids = ids
        return self._cache

    def copied(self, ids: tuple[int, ...]) -> list[Pair]:
        """By layer, copies of the keys and values ``[1, kv_heads, len(ids), dim]`` of `ids`."""
        cache = self.reach(ids)
        keys, values = (slots[:, :, :, : len(ids)].clone() for slots in (cache.slot_keys, cache.slot_values))
        return list(zip(keys, values, strict=True))

    def append(self, ids: tuple[int, ...]) -> None:
        """The caller has computed `ids` into the slots behind the prefix, which now goes on with them."""
        self.ids += ids

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cache is not None:
            self.model.pool.release(self._cache)
            self._cache = None
