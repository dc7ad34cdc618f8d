"""Who runs the model next: one forward at a time, and steps of streams before everything else.

A prompt that is read while others stream goes in short portions, and between two of them every stream gets its step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvquilt.model.pace import Pace

_LIVELY = 0.5  # seconds without a step, after which a stream is taken for one that nobody reads


class UnwantedError(Exception):
    """Ends a thread's work between two forwards; whoever said that it is unwanted catches it."""


class Turns:
    """A reentrant lock with a short way for those in a hurry."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._asked: dict[int, float] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._urgent: set[object] = set()
        self._own = threading.local()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Nobody else runs the model inside the block; whoever is in a hurry goes first.

        Raises:
            UnwantedError: nobody wants this thread's work any more; see `wanted`.
        """
        if not self.mine:
            with self._changed:
                while self._urgent:
                    self._changed.wait(0.1)  # whoever is interrupted twice does not say that it is through
            if self.unwanted():
                raise UnwantedError
        with self._held():
            yield

    @contextmanager
    def wanted(self, unwanted: Callable[[], bool]) -> Iterator[None]:
        """Inside the block this thread gets no turn once `unwanted` says so, or a block around: between two portions
        of a prompt, too."""
        around = self.unwanted
        self._own.unwanted = lambda: unwanted() or around()
        try:
            yield
        finally:
            self._own.unwanted = around

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """The same, before all who wait in `taken`."""
        own = object()
        try:
            with self._changed:
                self._urgent.add(own)
            with self._held():
                yield
        finally:
            self._urgent.discard(own)  # before the lock: what interrupts this thread may do so twice
            with self._changed:
                self._changed.notify_all()

    @property
    def unwanted(self) -> Callable[[], bool]:
        """Says whether nobody wants this thread's work any more."""
        return getattr(self._own, "unwanted", _never)

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    @property
    def held(self) -> float:
        """Seconds that this thread's last turn took, without its wait."""
        return float(getattr(self._own, "held", 0.0))

    @contextmanager
    def streaming(self, stream: int) -> Iterator[None]:
        """One stream more inside the block, by any number that no other one has."""
        with self._changed:
            self._asked[stream] = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                del self._asked[stream]

    def asked(self, stream: int) -> None:
        """It wants its next step."""
        with self._changed:
            if stream in self._asked:
                self._asked[stream] = time.monotonic()

    @property
    def streams(self) -> int:
        """How many decode now, without those that pause."""
        with self._changed:
            since = time.monotonic() - _LIVELY
            return sum(asked > since for asked in self._asked.values())

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            outer, own, begun = self._owner, threading.get_ident(), time.perf_counter()
            try:
                self._owner = own
                yield
            finally:
                self._owner = outer
                self._own.held = time.perf_counter() - begun


def _never() -> bool:
    return False
