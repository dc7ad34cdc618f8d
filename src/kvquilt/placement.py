"""The order of a prompt's parts and the logical position of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from kvquilt.prompt import Run


class Order(StrEnum):
    """Order policies."""

    GIVEN = "given"
    TARGET_LAST = "target_last"


@dataclass(frozen=True, slots=True)
class Placement:
    """Runs in their final order, standing one behind the other from position 0.

    Slot, logical order and logical position of a token are the same number: `starts[i]` is where run i begins.

    Attributes:
        target: run index of the retriever's best document, if there is one.
    """

    runs: tuple[Run, ...]
    starts: tuple[int, ...]
    target: int | None = None

    @property
    def tokens(self) -> int:
        return self.starts[-1] + len(self.runs[-1].ids) if self.runs else 0

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(i for run in self.runs for i in run.ids)

    def span(self, index: int) -> range:
        """Slots of run `index`."""
        return range(self.starts[index], self.starts[index] + len(self.runs[index].ids))

    def followed_by(self, ids: tuple[int, ...]) -> Placement:
        """The same with inline ids behind it."""
        return Placement((*self.runs, Run(ids)), (*self.starts, self.tokens), self.target) if ids else self

    def documents(self) -> list[int]:
        """Indices of the runs that are documents."""
        return [i for i, run in enumerate(self.runs) if run.document is not None]


def place_runs(runs: Sequence[Run], order: Order = Order.GIVEN, target: int | None = None) -> Placement:
    """Place `runs` one behind the other.

    Args:
        target: which of the documents is the retriever's best. `TARGET_LAST` moves it to the last document's place;
            the documents behind it move up by one, inline text stays where it is.
    """
    ordered = list(runs)
    places = [i for i, run in enumerate(runs) if run.document is not None]
    if order is Order.TARGET_LAST and target is not None:
        documents = [runs[i] for i in places]
        documents.append(documents.pop(target))
        for place, run in zip(places, documents, strict=True):
            ordered[place] = run
        target = len(places) - 1
    starts = list(accumulate((len(run.ids) for run in ordered), initial=0))
    return Placement(tuple(ordered), tuple(starts[:-1]), None if target is None else places[target])
