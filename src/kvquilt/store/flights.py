"""Single-flight: what one thread is fetching or compiling, the others wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvquilt.identity import SegmentKey
    from kvquilt.segment import CompiledSegment


class Flight:
    """One key on its way. `segment` is set before `landed` if it arrived, and stays None if it failed."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.landed = threading.Event()
        self.segment: CompiledSegment | None = None


class Boarding:
    """What one `Flights.board` claimed (`mine`) and what it found under way (`others`)."""

    def __init__(self, flights: Flights) -> None:
        self._flights = flights
        self._claimed: dict[SegmentKey, Flight] = {}
        self.others: dict[SegmentKey, Flight] = {}

    def claim(self, keys: Iterable[SegmentKey]) -> None:
        with self._flights.lock:
            for key in keys:
                flight = self._flights.open.get(key)
                if flight is None:
                    self._flights.open[key] = self._claimed[key] = Flight()
                elif flight.owner != threading.get_ident():  # waiting for oneself would never end
                    self.others[key] = flight

    def land(self, key: SegmentKey, segment: CompiledSegment | None) -> None:
        """Hand `segment` to whoever waits for `key`; None makes them fetch it themselves."""
        flight = self._claimed.pop(key, None)
        if flight is None:
            return
        flight.segment = segment
        with self._flights.lock:
            del self._flights.open[key]
        flight.landed.set()

    def abandon(self) -> None:
        for key in list(self._claimed):
            self.land(key, None)


class Flights:
    """The keys under way in one store.

    Nobody waits while keys of their own are still open: a boarding claims what is free, lands all of it, and
    only then waits for the rest. So overlapping sets in different orders cannot deadlock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: dict[SegmentKey, Flight] = {}

    @contextmanager
    def board(self, keys: Iterable[SegmentKey]) -> Iterator[Boarding]:
        """Claim the free ones among `keys`; what has not landed when the body ends, however it ends, is abandoned."""
        boarding = Boarding(self)
        try:
            boarding.claim(keys)
            yield boarding
        finally:
            boarding.abandon()
