"""A circuit breaker: a server that does not answer is left alone until it does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import StrEnum

_WINDOW = 20
_SLOW = 0.5


class BreakerState(StrEnum):
    CLOSED = "closed"  # calls go through
    OPEN = "open"  # none does
    HALF_OPEN = "half_open"  # one is on its way to find out


class Breaker:
    """Counts how calls end. Safe from any thread; it makes no calls and has no clock.

    It opens after `failures` in a row, at once after one that used up its deadline, and when at least half of the last
    20 calls took more than half of theirs. Then `opened` is called, outside the lock; somebody has to
    `try_again`, since users' calls are not spent on finding out.
    """

    def __init__(self, failures: int, opened: Callable[[], None]) -> None:
        self._failures, self._opened = failures, opened
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._in_a_row = 0
        self._slow: deque[bool] = deque(maxlen=_WINDOW)
        self.openings = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def closed(self) -> bool:
        return self._state is BreakerState.CLOSED

    def succeeded(self, share: float) -> None:
        """A call ended well and took this share of its deadline."""
        with self._lock:
            self._in_a_row = 0
            self._slow.append(share > _SLOW)
            opens = len(self._slow) == _WINDOW and sum(self._slow) >= _WINDOW / 2 and self._open()
        if opens:
            self._opened()

    def failed(self, *, late: bool) -> None:
        """A call ended badly; `late`: by its deadline."""
        with self._lock:
            self._in_a_row += 1
            opens = (late or self._in_a_row >= self._failures) and self._open()
        if opens:
            self._opened()

    def try_again(self) -> None:
        """One call goes out to see whether the server is back; `settle` says."""
        with self._lock:
            self._state = BreakerState.HALF_OPEN

    def settle(self, *, answered: bool) -> None:
        with self._lock:
            self._state = BreakerState.CLOSED if answered else BreakerState.OPEN
            self._in_a_row = 0
            self._slow.clear()

    def _open(self) -> bool:
        """Whether it was closed; those that were under way when it opened change nothing."""
        if self._state is not BreakerState.CLOSED:
            return False
        self._state = BreakerState.OPEN
        self.openings += 1
        return True
