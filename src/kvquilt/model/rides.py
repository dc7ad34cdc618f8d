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

from kvquilt.model.counter import RowCounter
from kvquilt.model.parts import Parts
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache


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
        whole: of it; all layers compute all rows of its plan, and nobody watches.
        last: how many of them go.
        unwanted: says that none more needs to go.
        gone: how many have gone; their keys and values are in the cache.
    """

    whole: Part
    last: int
    unwanted: Callable[[], bool]
    gone: int = 0
    aboard: bool = field(default=False, repr=False)

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
        self._left: dict[int, float] = {}  # when one last went, by whose parts it went over

    def along(self, ride: Ride, patience: float) -> None:
        """Let it go along until all its rows have gone, none could for `patience` seconds, or it is unwanted."""
        parts = id(ride.whole.cache.parts)
        with self._changed:
            begun = time.monotonic()
            self._waiting.append(ride)
            try:
                while ride.gone < ride.last and not ride.unwanted():
                    left = max(begun, self._left.get(parts, 0.0)) + patience - time.monotonic()
                    if left <= 0 and not ride.aboard:
                        break
                    self._changed.wait(max(left, 0.001))
            finally:
                self._waiting.remove(ride)
                while ride.aboard:  # whoever steps is writing into its cache
                    self._changed.wait()

    @contextmanager
    def boarding(self, parts: Parts, rows: int) -> Iterator[Part | None]:
        """What goes along with a forward over `parts` inside the block, `rows` at most; None if nothing does.

        They have gone if the block ends well, else they go another time.
        """
        with self._changed:
            fit = (each for each in self._waiting if each.whole.cache.parts is parts and not each.unwanted())
            ride = next(fit, None) if rows else None
            if ride is not None:
                ride.aboard = True
        part = None if ride is None else ride.part(rows)
        went = False
        try:
            yield part
            went = True
        finally:
            with self._changed:
                if ride is not None and part is not None:
                    self._left = {id(parts): time.monotonic()}
                    ride.aboard = False
                    ride.gone += len(part.ids) if went else 0
                    if ride in self._waiting:  # next time it is another's turn
                        self._waiting.remove(ride)
                        self._waiting.append(ride)
                self._changed.notify_all()
