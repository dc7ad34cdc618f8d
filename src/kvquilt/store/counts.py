"""Counters and pins that tiers keep."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvquilt.store.base import Failure, FailureReason, Miss, MissReason, TierStats

if TYPE_CHECKING:
    from kvquilt.identity import SegmentKey

# what is stored under a key is not what was put there; of a collision either the digest broke or somebody forged a file
DAMAGE = frozenset((MissReason.TRUNCATED, MissReason.CORRUPT, MissReason.SWAPPED, MissReason.COLLISION))


class Counts:
    """Hits, misses and failures by reason, evictions; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.hits = 0
        self.evictions = 0
        self.integrity_failures = 0
        self.misses: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def hit(self) -> None:
        with self._lock:
            self.hits += 1

    def miss(self, reason: MissReason) -> Miss:
        with self._lock:
            self.misses[reason.value] += 1
            self.integrity_failures += reason in DAMAGE
        return Miss(reason)

    def failure(self, reason: FailureReason, count: int = 1) -> Failure:
        with self._lock:
            self.failures[reason.value] += count
        return Failure(reason)

    def evicted(self, count: int) -> None:
        with self._lock:
            self.evictions += count

    def stats(
        self,
        segments: int | None,
        size: int | None,
        budget: int | None,
        pinned: int,
        waiting: int = 0,
        breaker: str = "",
    ) -> TierStats:
        """What the tier holds, with everything counted so far."""
        with self._lock:
            return TierStats(
                segments=segments,
                bytes=size,
                budget=budget,
                hits=self.hits,
                misses=dict(self.misses),
                evictions=self.evictions,
                failures=dict(self.failures),
                pinned=pinned,
                integrity_failures=self.integrity_failures,
                waiting=waiting,
                breaker=breaker,
            )


class Pins:
    """How often each key is held. A key may be pinned before it is stored."""

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self._lock = lock or threading.RLock()
        self._held: Counter[SegmentKey] = Counter()

    def __contains__(self, key: SegmentKey) -> bool:
        with self._lock:
            return key in self._held

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def keys(self) -> list[SegmentKey]:
        with self._lock:
            return list(self._held)

    @contextmanager
    def hold(self, key: SegmentKey) -> Iterator[None]:
        with self._lock:
            self._held[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[key] -= 1
                if not self._held[key]:
                    del self._held[key]
