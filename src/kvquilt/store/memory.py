"""The memory tier: compiled segments within a byte budget."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvquilt.errors import IntegrityError
from kvquilt.store.base import Failure, FailureReason, Hit, Layout, Miss, MissReason, Row, Stored, Tier, TierStats
from kvquilt.store.counts import Counts, Pins
from kvquilt.store.quotas import Quotas, Quoting

if TYPE_CHECKING:
    from kvquilt.identity import SegmentKey
    from kvquilt.segment import CompiledSegment

_SLACK_BYTES = 8192


@dataclass(slots=True)
class _Entry:
    segment: CompiledSegment
    serial: int
    frequency: int
    last_use: float
    priority: float = 0.0


@dataclass(slots=True)
class _Pool:
    """Segments that compete for the same room: all, or with quotas those of a namespace."""

    bytes: int = 0
    live: int = 0
    clock: float = 0.0
    heap: list[tuple[float, int, SegmentKey]] = field(default_factory=list)


class MemoryTier(Tier):
    """Keeps the tensors it is given (memory-mapped ones included) up to `budget` bytes of keys, values and side data.

    What is evicted first is what saves the least work per byte: tokens x frequency / bytes. Frequency alone
    never forgets, so a segment that was popular last week would keep out everything of today; as in GDSF, each
    priority therefore starts from a clock that rises to the priority of the last victim, and whatever is no
    longer used is overtaken. With quotas every namespace has a clock of its own.
    """

    name = "memory"

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.RLock()
        self._entries: dict[SegmentKey, _Entry] = {}
        self._pools: dict[str, _Pool] = {}
        self._quoting: Quoting | None = None
        self._serials = itertools.count()
        self._pins = Pins(self._lock)
        self._counts = Counts()

    def get(self, key: SegmentKey, ids: tuple[int, ...], layout: Layout | None = None) -> Hit | Miss:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return self._counts.miss(MissReason.ABSENT)
            segment = entry.segment
            if segment.ids != ids:
                return self._counts.miss(MissReason.COLLISION)
            refusal = layout.refusal(segment) if layout is not None else None
            if refusal is not None:
                return self._counts.miss(refusal)
            self._use(key, entry)
        self._counts.hit()
        return Hit(segment, segment.nbytes)

    def quote(self, quoting: Quoting) -> None:
        """Hold every namespace to its quota from now on."""
        with self._lock:
            clock = max((pool.clock for pool in self._pools.values()), default=0.0)
            self._pools, self._quoting = {}, quoting
            for key, entry in self._entries.items():
                pool = self._pool(key)
                pool.clock = clock
                _enter(pool, key, entry)

    def put(self, key: SegmentKey, segment: CompiledSegment) -> Stored | Failure:
        size = segment.nbytes
        if size > self.budget:
            return self._counts.failure(FailureReason.OVER_BUDGET)
        quotas = None if self._quoting is None else self._quoting().within(self.budget)
        if quotas is not None and size > quotas.bytes.get(key.namespace, 0):
            return self._counts.failure(FailureReason.OVER_QUOTA)
        segment = _compact(segment)
        with self._lock:
            old = self._entries.get(key)
            if not self._make_room(size - (old.segment.nbytes if old else 0), key, quotas):
                return self._counts.failure(FailureReason.HELD)
            self._drop(key)
            entry = _Entry(segment, next(self._serials), (old.frequency if old else 1), time.time())
            pool = self._pool(key)
            entry.priority = pool.clock + _value(entry)
            self._entries[key] = entry
            _enter(pool, key, entry)
        return Stored(size)

    def touch(self, key: SegmentKey) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._use(key, entry)

    def remove(self, key: SegmentKey) -> bool:
        with self._lock:
            return self._drop(key)

    def clear(self) -> None:
        """Forget every segment that nobody holds."""
        with self._lock:
            for key in [key for key in self._entries if key not in self._pins]:
                self._drop(key)

    def contains(self, key: SegmentKey) -> bool:
        with self._lock:
            return key in self._entries

    def keys(self, namespace: str | None = None) -> Iterator[SegmentKey]:
        return (row.key for row in self.rows(namespace))

    def rows(self, namespace: str | None = None) -> Iterator[Row]:
        with self._lock:
            found = [
                Row(key, entry.segment.tokens, entry.segment.nbytes, entry.frequency, entry.last_use)
                for key, entry in self._entries.items()
                if namespace is None or key.namespace == namespace
            ]
        return iter(found)

    def sizes(self) -> Mapping[str, int]:
        with self._lock:
            found: Counter[str] = Counter()
            for key, entry in self._entries.items():
                found[key.namespace] += entry.segment.nbytes
        return found

    def pin(self, key: SegmentKey) -> AbstractContextManager[None]:
        return self._pins.hold(key)

    def stats(self) -> TierStats:
        with self._lock:
            return self._counts.stats(len(self._entries), self._bytes, self.budget, len(self._pins))

    def check_integrity(self) -> None:
        with self._lock:
            total = sum(entry.segment.nbytes for entry in self._entries.values())
            if total != self._bytes:
                raise IntegrityError(f"memory tier: counts {self._bytes} bytes, its segments have {total}")
            if total > self.budget:
                raise IntegrityError(f"memory tier: holds {total} bytes, its budget is {self.budget}")
            pools = {name: pool.bytes for name, pool in self._pools.items() if pool.live}
            if self._quoting is not None and pools != self.sizes():
                raise IntegrityError("memory tier: counts bytes of a namespace that are not there, or another's")
            queued = {serial for pool in self._pools.values() for _, serial, _ in pool.heap}
            lost = sum(entry.serial not in queued for entry in self._entries.values())
            if lost:
                raise IntegrityError(f"memory tier: {lost} segments can never be evicted")

    def close(self) -> None:
        self.clear()

    @property
    def _bytes(self) -> int:
        return sum(pool.bytes for pool in self._pools.values())

    def _pool(self, key: SegmentKey) -> _Pool:
        return self._pools.setdefault("" if self._quoting is None else key.namespace, _Pool())

    def _use(self, key: SegmentKey, entry: _Entry) -> None:
        entry.frequency += 1
        entry.last_use = time.time()
        entry.priority = self._pool(key).clock + _value(entry)

    def _drop(self, key: SegmentKey) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        pool = self._pool(key)
        pool.bytes -= entry.segment.nbytes
        pool.live -= 1
        if len(pool.heap) > 2 * pool.live + 64:  # removals and replacements leave dead nodes behind
            pool.heap = [
                (live.priority, live.serial, name) for name, live in self._entries.items() if self._pool(name) is pool
            ]
            heapq.heapify(pool.heap)
        return True

    def _make_room(self, more: int, keep: SegmentKey, quotas: Quotas | None) -> bool:
        """Evict until `more` bytes fit; evicts nothing if that cannot succeed."""
        held: Counter[str] = Counter()
        for key in {keep, *self._pins.keys()}:
            if key in self._entries:
                held["" if quotas is None else key.namespace] += self._entries[key].segment.nbytes
        taken = {name: pool.bytes for name, pool in self._pools.items()}
        if quotas is not None:
            free = {name: size - held[name] for name, size in taken.items()}
            plan = quotas.relief(taken, free, keep.namespace, more, self.budget)
            if plan is None:
                return False
        else:
            plan = {"": self._bytes + more - self.budget}
            if self._bytes - held[""] < plan[""]:
                return False
        for name, needed in plan.items():
            if needed > 0:
                self._evict(self._pools[name], needed, keep)
        return True

    def _evict(self, pool: _Pool, needed: int, keep: SegmentKey) -> None:
        """Evict the least useful that nobody holds, `needed` bytes or a little more; there are so many."""
        spared, until = [], pool.bytes - needed
        while pool.bytes > until:
            priority, serial, key = heapq.heappop(pool.heap)
            entry = self._entries.get(key)
            if entry is None or entry.serial != serial:
                continue
            if entry.priority > priority:  # used since it was queued: a use costs no heap operation, only this
                heapq.heappush(pool.heap, (entry.priority, serial, key))
            elif key == keep or key in self._pins:
                spared.append((priority, serial, key))
            else:
                pool.clock = max(pool.clock, priority)
                self._drop(key)
                self._counts.evicted(1)
        for node in spared:
            heapq.heappush(pool.heap, node)


def _enter(pool: _Pool, key: SegmentKey, entry: _Entry) -> None:
    pool.bytes += entry.segment.nbytes
    pool.live += 1
    heapq.heappush(pool.heap, (entry.priority, entry.serial, key))


def _value(entry: _Entry) -> float:
    return entry.segment.tokens * entry.frequency / max(1, entry.segment.nbytes)


def _compact(segment: CompiledSegment) -> CompiledSegment:
    """The segment itself, or a copy where its tensors are slices that keep a much larger buffer alive."""
    tensors = (segment.keys, segment.values, *segment.side.values())
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    if sum(storages.values()) <= segment.nbytes + segment.nbytes // 4 + _SLACK_BYTES:
        return segment
    side = {name: tensor.clone() for name, tensor in segment.side.items()}
    return replace(segment, keys=segment.keys.clone(), values=segment.values.clone(), side=side)
