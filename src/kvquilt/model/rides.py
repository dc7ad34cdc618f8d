"""Rows of a prompt that ride along with steps of streams: the weights are read once for both.

    step      t1   t2   t3 ...        a token of each stream
    along     p p p p p p p p         the next rows of a prompt, over its own cache, without logits

Whoever reads a prompt hands over what is to be read and sleeps; whoever leads a step takes along as many rows as cost
the streams no more than a step's time (`kvquilt.model.pace`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from kvquilt.errors import NumericsError
from kvquilt.model.counter import RowCounter
from kvquilt.model.parts import Parts
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache

_LATELY = 0.5  # seconds
_FORGOTTEN = 30.0


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Ids ``[rows]`` int64 and what a forward needs to compute them."""

    ids: torch.Tensor
    plan: RowPlan
    cache: SlotCache
    counter: RowCounter


@dataclass(eq=False, slots=True)
class Ride:
    """Rows that may go along, the earlier ones first.

    Attributes:
        whole: of it; all layers compute all rows of its plan, to the end of the last, and nobody watches.
        last: up to which of its rows.
        unwanted: says that none more needs to go.
        gone: how many have gone; their keys and values are in the cache.
        aboard: somebody steps with it, and may be writing into its cache.
        refused: a forward with it failed, maybe by its rows.
    """

    whole: Part
    last: int
    unwanted: Callable[[], bool]
    gone: int = 0
    aboard: bool = field(default=False, repr=False)
    refused: bool = field(default=False, repr=False)

    def over(self) -> bool:
        """Whether no more of it goes."""
        return self.gone >= self.last or self.refused or self.unwanted()

    def part(self, rows: int) -> Part:
        """The next `rows` at most."""
        last = min(self.last, self.gone + rows)
        # a last layer that is left early would end the streams' rows, too
        plan = replace(self.whole.plan.part(self.gone, last), until=None)
        return replace(self.whole, ids=self.whole.ids[self.gone : last], plan=plan)


class Rides:
    """Of one model. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Ride] = []
        self._stepped: dict[int, float] = {}  # when a step that has room was last seen, by whose parts it goes over

    def along(self, ride: Ride, patience: float) -> None:
        """Let it go along until all its rows have gone, it is unwanted or refused, or the last step that has room for
        it is `patience` seconds ago: at once where there was none."""
        try:
            with self._changed:
                self._waiting.append(ride)
                while not ride.over():
                    left = self._left(ride.whole.cache.parts, patience)
                    if left <= 0 and not ride.aboard:
                        break
                    self._changed.wait(max(left, 0.001))
        finally:
            interrupted = None
            while ride in self._waiting or ride.aboard:  # until nobody writes into its cache
                try:
                    with self._changed:
                        if ride in self._waiting:
                            self._waiting.remove(ride)
                        if ride.aboard:
                            self._changed.wait(0.1)  # whoever is interrupted twice does not say that it is over
                except BaseException as error:  # noqa: BLE001  raised once that step is over
                    interrupted = error
            if interrupted is not None:
                raise interrupted

    def stepping(self, parts: Parts) -> bool:
        """Whether steps over `parts` have been taken lately."""
        with self._changed:
            return self._left(parts, _LATELY) > 0

    def ended(self, parts: Parts) -> None:
        """The last stream has, over `parts`: nobody waits for its steps."""
        with self._changed:
            self._stepped.pop(id(parts), None)
            self._changed.notify_all()

    @contextmanager
    def boarding(self, parts: Parts, rows: int) -> Iterator[Part | None]:
        """What goes along with a forward over `parts` inside the block, `rows` at most; None if nothing does.

        They have gone if the block ends well, else they go another time; but where it was no stream's numbers that
        failed, it may have been by them, and they are left to be read alone.
        """
        ride, gone = None, 0
        try:
            with self._changed:
                fit = (each for each in self._waiting if each.whole.cache.parts is parts and not each.aboard)
                if rows:
                    self._saw(parts)
                    ride = next((each for each in fit if not each.over()), None)
                if ride is not None:
                    ride.aboard = True
            part = None if ride is None else ride.part(rows)
            yield part
            gone = 0 if part is None else len(part.ids)
        except Exception as error:
            if ride is not None:
                ride.refused = not isinstance(error, NumericsError)
            raise
        finally:
            if ride is not None:  # before the lock: what interrupts this thread may do so twice
                ride.gone += gone
                ride.aboard = False
            with self._changed:
                if rows:
                    self._saw(parts)
                if ride in self._waiting:  # next time it is another's turn
                    # in one assignment: its owner looks without the lock
                    self._waiting = [each for each in self._waiting if each is not ride] + [ride]
                self._changed.notify_all()

    def _left(self, parts: Parts, patience: float) -> float:
        """Seconds until the last step that was seen is `patience` ago."""
        return self._stepped.get(id(parts), float("-inf")) + patience - time.monotonic()

    def _saw(self, parts: Parts) -> None:
        now = time.monotonic()
        self._stepped = {of: at for of, at in self._stepped.items() if now - at < _FORGOTTEN}
        self._stepped[id(parts)] = now
