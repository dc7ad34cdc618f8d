"""The slot cache: a preallocated key-value cache that rows are scattered into."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvquilt.errors import IntegrityError
from kvquilt.model.parts import PLAIN, Parts
from kvquilt.model.rows import LayerReached, RowPlan, SlotView, current_plan


class SlotLayer(CacheLayerMixin):
    """One layer's view of the slots. Writing needs a row plan, so a cache handed to `generate` fails at once."""

    is_croppable = False
    keys: torch.Tensor  # from the start, unlike in the base class
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self._layer = keys, values, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: slots exist before the first update."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter ``[batch, kv_heads, rows, dim]`` into the layer's rows; return the filled slots, not a copy."""
        plan = current_plan()
        if plan is None:
            raise IntegrityError("a slot cache is written through a row plan only; it cannot be passed to generate()")
        if plan.watcher is not None:
            plan.watcher.writes(self._layer, plan, (self.keys, self.values), (key_states, value_states))
        index = plan.current.index
        self.keys[:, :, index] = key_states
        self.values[:, :, index] = value_states
        if plan.until == self._layer and not plan.queries:
            raise LayerReached
        return self.keys[:, :, : plan.filled], self.values[:, :, : plan.filled]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        plan = current_plan()
        return plan.filled if plan is not None else 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class SlotCache(Cache):
    """Slots of one request (or of one compile batch).

    Attributes:
        slot_keys: ``[layers, batch, kv_heads, capacity, key_dim]``; `slot_values` likewise with value_dim. Owned and
            private: stored segments are copied in and never written.
        slot_layers: what the model sees of them, layer by layer.
        filled: slots in use, always a prefix of the capacity. What lies behind is garbage and never read.
        view: where the slots stand, if not at their own numbers.
        parts: trained parts of every forward over this cache; plain for a reader without any.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        pairs = enumerate(zip(keys, values, strict=True))
        self.slot_layers = tuple(SlotLayer(k, v, i) for i, (k, v) in pairs)
        super().__init__(layers=[*self.slot_layers])
        self.slot_keys, self.slot_values = keys, values
        self.filled = 0
        self.view: SlotView | None = None
        self.parts: Parts = PLAIN

    @property
    def capacity(self) -> int:
        return int(self.slot_keys.shape[3])

    @property
    def next_position(self) -> int:
        """Logical position of the next token, which is not `filled` where tokens were dropped or share positions."""
        return self.filled if self.view is None else int(self.view.at(torch.tensor(self.filled)))

    @property
    def nbytes(self) -> int:
        return self.slot_keys.nbytes + self.slot_values.nbytes

    def tail(self, count: int) -> RowPlan:
        """The plan that writes the next `count` tokens behind the filled slots."""
        total = self.filled + count
        return RowPlan(torch.arange(self.filled, total), total, view=self.view)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Caches that are out, their bytes, and the bytes of the one kept for the next request."""

    lent: int
    lent_bytes: int
    spare_bytes: int


def rounded(capacity: int) -> int:
    """Slots of a fresh cache with room for `capacity` tokens."""
    return -(-capacity // 64) * 64


class SlotPool:
    """Hands out slot caches and keeps the last one that came back.

    Fresh memory costs a page fault per 4 KiB, a noticeable part of the time to the first token; one recycled buffer
    avoids it and bounds what is kept.

    Attributes:
        slack: how much larger than asked for a recycled cache may be: so many times, and so many slots more.
    """

    def __init__(
        self, layers: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layers, self._heads, self._dims = layers, kv_heads, (key_dim, value_dim)
        self._dtype, self._device = dtype, device
        self.slack = (4, 1024)
        self._spare: SlotCache | None = None
        self._lock = threading.Lock()
        self._out: WeakSet[SlotCache] = WeakSet()  # weak: a cache that is dropped is a fault, but no memory
        self._lent = 0

    @property
    def lent(self) -> int:
        """Caches acquired and not given back, those that were dropped included."""
        return self._lent

    def acquire(self, capacity: int, batch: int = 1) -> SlotCache:
        """An empty cache with room for at least `capacity` tokens; give it back with `release`, once."""
        with self._lock:
            spare = self._spare
            # the slack bound keeps a huge buffer from serving, and being held by, small requests
            times, more = self.slack
            if spare is not None and batch == 1 and capacity <= spare.capacity <= times * capacity + more:
                self._spare = None
                spare.filled, spare.view, spare.parts = 0, None, PLAIN
                return self._lend(spare)
        room = rounded(capacity)
        key_dim, value_dim = self._dims
        shape = (self._layers, batch, self._heads, room)
        fresh = SlotCache(
            torch.empty(*shape, key_dim, dtype=self._dtype, device=self._device),
            torch.empty(*shape, value_dim, dtype=self._dtype, device=self._device),
        )
        with self._lock:
            return self._lend(fresh)

    def release(self, cache: SlotCache) -> None:
        """Take `cache` back; whoever gave it must not touch it again.

        Raises:
            IntegrityError: this pool has not lent it, or has it back already: two requests would write into it.
        """
        with self._lock:
            if cache not in self._out:
                raise IntegrityError(
                    "slot pool: a cache came back that is not lent: of another pool, or given back twice"
                )
            self._out.discard(cache)
            self._lent -= 1
            cache.parts = PLAIN  # a spare cache must not keep what its last request looked at
            if cache.slot_keys.shape[1] == 1:
                self._spare = cache

    @contextmanager
    def lend(self, capacity: int, batch: int = 1) -> Iterator[SlotCache]:
        """`acquire` for a block that does not hand the cache on; released at its end."""
        cache = self.acquire(capacity, batch)
        try:
            yield cache
        finally:
            self.release(cache)

    def stats(self) -> PoolStats:
        with self._lock:
            out, spare = sum(cache.nbytes for cache in self._out), self._spare
            return PoolStats(self._lent, out, 0 if spare is None else spare.nbytes)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` with the first broken invariant."""
        with self._lock:
            out, spare = list(self._out), self._spare
            if len(out) != self._lent:
                raise IntegrityError(
                    f"slot pool: {self._lent - len(out)} lent caches were dropped and never given back"
                )
            if spare is not None and (spare in out or spare.slot_keys.shape[1] != 1):
                raise IntegrityError("slot pool: the spare cache is lent at the same time, or holds a batch")
            over = [cache for cache in out if not 0 <= cache.filled <= cache.capacity]
            if over:
                raise IntegrityError(f"slot pool: a cache of {over[0].capacity} slots says {over[0].filled} are filled")

    def grow(self, cache: SlotCache, capacity: int) -> SlotCache:
        """`cache` if it has the room, else a larger one with the filled slots copied; the old one is released."""
        if capacity <= cache.capacity:
            return cache
        larger = self.acquire(capacity)
        larger.slot_keys[:, :, :, : cache.filled] = cache.slot_keys[:, :, :, : cache.filled]
        larger.slot_values[:, :, :, : cache.filled] = cache.slot_values[:, :, :, : cache.filled]
        larger.filled, larger.view, larger.parts = cache.filled, cache.view, cache.parts
        self.release(cache)
        return larger

    def _lend(self, cache: SlotCache) -> SlotCache:
        self._out.add(cache)
        self._lent += 1
        return cache
