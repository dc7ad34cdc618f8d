"""Work on a remote tier that nobody waits for: one thread, one key after another, a bounded queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvquilt.identity import SegmentKey

    Parts = Sequence[memoryview]


class Outbox:
    """Hands every offered value to `send`, in order; of two for one key that wait, only the later one.

    Args:
        send: ``send(key, parts)``, where None for parts removes the key; called from the thread, must not raise.
        limit: bytes that may wait, beside what is being sent.
    """

    def __init__(self, send: Callable[[SegmentKey, Parts | None], None], limit: int) -> None:
        self._send, self._limit = send, limit
        self._changed = threading.Condition()
        self._waiting: dict[SegmentKey, Parts | None] = {}
        self._bytes = 0
        self._sending: SegmentKey | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting) + (self._sending is not None)

    def offer(self, key: SegmentKey, parts: Parts | None) -> bool:
        """Whether there was room. The parts must not change any more."""
        with self._changed:
            size = _size(parts) - _size(self._waiting.get(key))
            if self._closed or self._bytes + size > self._limit:
                return False
            self._waiting.pop(key, None)
            self._waiting[key] = parts
            self._bytes += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvquilt-outbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def discard(self, key: SegmentKey, seconds: float) -> None:
        """Forget what waits for `key`, and let what is being sent arrive, so that it cannot come after a removal."""
        with self._changed:
            self._bytes -= _size(self._waiting.pop(key, None))
            self._changed.wait_for(lambda: self._sending != key, seconds)

    def flush(self, seconds: float) -> bool:
        """Wait until nothing waits; whether that was reached in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._sending is None, seconds)

    def close(self, seconds: float) -> int:
        """Flush, then stop; how many values still waited and are given up. One that is being sent may yet arrive."""
        until = time.monotonic() + seconds
        self.flush(seconds)
        with self._changed:
            left = len(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))
        return left

    def check(self) -> str:
        """What is wrong with the books, "" if nothing is."""
        with self._changed:
            total = sum(map(_size, self._waiting.values()))
            if total != self._bytes:
                return f"counts {self._bytes} waiting bytes, there are {total}"
            dead = self._waiting and (self._thread is None or not self._thread.is_alive())
            return "values wait and nobody sends them" if dead else ""

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if not self._waiting:
                    return
                key = self._sending = next(iter(self._waiting))
                parts = self._waiting.pop(key)
                self._bytes -= _size(parts)
            try:
                self._send(key, parts)
            finally:
                parts = None  # the segment's memory is the caller's again
                with self._changed:
                    self._sending = None
                    self._changed.notify_all()


def _size(parts: Parts | None) -> int:
    return sum(part.nbytes for part in parts) if parts else 0
