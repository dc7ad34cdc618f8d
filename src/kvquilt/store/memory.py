"""The memory tier: compiled segments within a byte budget."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvquilt.errors import IntegrityError
from kvquilt.store.base import Failure, FailureReason, Hit, Layout, Miss, MissReason, Row, Stored, Tier, TierStats
from kvquilt.store.counts import Counts, Pins

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


class MemoryTier(Tier):
    """Keeps the tensors it is given (memory-mapped ones included) up to `budget` bytes of keys, values and side data.

    What is evicted first is what saves the least work per byte: tokens x frequency / bytes. Frequency alone
    never forgets, so a segment that was popular last week would keep out everything of today; as in GDSF, each
    priority therefore starts from a clock that rises to the priority of the last victim, and whatever is no
    longer used is overtaken.
    """

    name = "memory"

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.RLock()
        self._entries: dict[SegmentKey, _Entry] = {}
        self._heap: list[tuple[float, int, SegmentKey]] = []
        self._serials = itertools.count()
        self._bytes = 0
        self._clock = 0.0
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
            self._use(entry)
        self._counts.hit()
        return Hit(segment, segment.nbytes)

    def put(self, key: SegmentKey, segment: CompiledSegment) -> Stored | Failure:
        size = segment.nbytes
        if size > self.budget:
            return self._counts.failure(FailureReason.OVER_BUDGET)
        segment = _compact(segment)
        with self._lock:
            old = self._entries.get(key)
            if not self._make_room(size - (old.segment.nbytes if old else 0), keep=key):
                return self._counts.failure(FailureReason.HELD)
            self._drop(key)
            entry = _Entry(segment, next(self._serials), (old.frequency if old else 1), time.time())
            entry.priority = self._clock + _value(entry)
            self._entries[key] = entry
            self._bytes += size
            heapq.heappush(self._heap, (entry.priority, entry.serial, key))
        return Stored(size)

    def touch(self, key: SegmentKey) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._use(entry)

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
            queued = {serial for _, serial, _ in self._heap}
            lost = sum(entry.serial not in queued for entry in self._entries.values())
            if lost:
                raise IntegrityError(f"memory tier: {lost} segments can never be evicted")

    def close(self) -> None:
        self.clear()

    def _use(self, entry: _Entry) -> None:
        entry.frequency += 1
        entry.last_use = time.time()
        entry.priority = self._clock + _value(entry)

    def _drop(self, key: SegmentKey) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._bytes -= entry.segment.nbytes
        if len(self._heap) > 2 * len(self._entries) + 64:  # removals and replacements leave dead nodes behind
            self._heap = [(live.priority, live.serial, name) for name, live in self._entries.items()]
            heapq.heapify(self._heap)
        return True

    def _make_room(self, size: int, keep: SegmentKey) -> bool:
        """Evict until `size` more bytes fit; evicts nothing if that cannot succeed."""
        needed = self._bytes + size - self.budget
        if needed <= 0:
            return True
        held = sum(self._entries[key].segment.nbytes for key in {keep, *self._pins.keys()} if key in self._entries)
        if self._bytes - held < needed:
            return False
        spared = []
        while self._bytes + size > self.budget:
            priority, serial, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.serial != serial:
                continue
            if entry.priority > priority:  # used since it was queued: a use costs no heap operation, only this
                heapq.heappush(self._heap, (entry.priority, serial, key))
            elif key == keep or key in self._pins:
                spared.append((priority, serial, key))
            else:
                self._clock = max(self._clock, priority)
                self._drop(key)
                self._counts.evicted(1)
        for node in spared:
            heapq.heappush(self._heap, node)
        return True


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
