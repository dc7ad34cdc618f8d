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
    """

    runs: tuple[Run, ...]
    starts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.starts[-1] + len(self.runs[-1].ids) if self.runs else 0

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(i for run in self.runs for i in run.ids)

    def span(self, index: int) -> range:
        """Slots of run `index`."""
        return range(self.starts[index], self.starts[index] + len(self.runs[index].ids))

    def documents(self) -> list[int]:
        """Indices of the runs that are documents."""
        return [i for i, run in enumerate(self.runs) if run.document is not None]


def place_runs(runs: Sequence[Run], order: Order = Order.GIVEN, target: int | None = None) -> Placement:
    """Place `runs` one behind the other.

    Args:
        target: index into the document runs of the one that `TARGET_LAST` moves to the last document's place; the
            documents behind it move up by one, inline text stays where it is. Ignored by `GIVEN`.
    """
    ordered = list(runs)
    if order is Order.TARGET_LAST and target is not None:
        places = [i for i, run in enumerate(runs) if run.document is not None]
        documents = [runs[i] for i in places]
        documents.append(documents.pop(target))
        for place, run in zip(places, documents, strict=True):
            ordered[place] = run
    starts = list(accumulate((len(run.ids) for run in ordered), initial=0))
    return Placement(tuple(ordered), tuple(starts[:-1]))
