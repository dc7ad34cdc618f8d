"""The order of a prompt's parts, the slots they take, and the logical position of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, groupby

import torch

from kvquilt.model.rows import SlotView
from kvquilt.prompt import Run


class Order(StrEnum):
    """Order policies.

    ``given``; ``target_last``: the retriever's best documents move next to the question; ``density_ascending``:
    documents with more of a selector's rows stand nearer to the question (InfoFlow, arXiv 2603.05353);
    ``shared_positions``: neighbouring documents all begin at one logical position, and what follows stands behind the
    longest of them (APE, arXiv 2502.05431); ``documents_first``: all documents before all inline text.
    """

    GIVEN = "given"
    TARGET_LAST = "target_last"
    DENSITY_ASCENDING = "density_ascending"
    SHARED_POSITIONS = "shared_positions"
    DOCUMENTS_FIRST = "documents_first"


@dataclass(frozen=True, slots=True)
class Placement:
    """Runs in their final order. Slots stand one behind the other from 0, whatever the logical positions.

    Attributes:
        starts: first slot of every run.
        ranking: run indices of the documents, the retriever's best first; empty where nothing ranked them.
        shared: neighbouring documents share logical positions; otherwise a token's position is its slot.
    """

    runs: tuple[Run, ...]
    starts: tuple[int, ...]
    ranking: tuple[int, ...] = ()
    shared: bool = False

    @property
    def tokens(self) -> int:
        """Slots of all runs."""
        return self.starts[-1] + len(self.runs[-1].rows) if self.runs else 0

    @property
    def ids(self) -> tuple[int, ...]:
        """One per slot, soft ones among them."""
        return tuple(i for run in self.runs for i in run.rows)

    @property
    def positions(self) -> tuple[int, ...]:
        """Logical position of every run's first slot."""
        if not self.shared:
            return self.starts
        out, here = [], 0
        for is_document, group in groupby(self.runs, key=lambda run: run.document is not None):
            lengths = [len(run.rows) for run in group]
            if is_document:
                out += [here] * len(lengths)
                here += max(lengths)
            else:
                out += accumulate(lengths[:-1], initial=here)
                here += sum(lengths)
        return tuple(out)

    @property
    def end(self) -> int:
        """Logical position of the token behind the prompt."""
        ends = (p + len(run.rows) for p, run in zip(self.positions, self.runs, strict=True))
        return max(ends, default=0)

    def view(self) -> SlotView | None:
        """Where the slots stand, if not at their own numbers."""
        if not self.shared:
            return None
        parts = [torch.arange(p, p + len(r.rows)) for p, r in zip(self.positions, self.runs, strict=True)]
        return SlotView(torch.cat(parts), self.end - self.tokens)

    def span(self, index: int) -> range:
        """Slots of the tokens of run `index`; what its writer put around them is in `extent`."""
        run, first = self.runs[index], self.starts[index] + len(self.runs[index].header)
        return range(first, first + len(run.ids)) if run.placed else range(first, first)

    def extent(self, index: int) -> range:
        """All slots of run `index`."""
        return range(self.starts[index], self.starts[index] + len(self.runs[index].rows))

    def wrapped(self, around: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]) -> Placement:
        """The same with a header and a trailer of soft ids around the runs that `around` names."""
        runs = list(self.runs)
        for i, (header, trailer) in around.items():
            runs[i] = replace(runs[i], header=header, trailer=trailer)
        return _placed(runs, self.ranking, self.shared)

    def without_slots(self, documents: Collection[int]) -> Placement:
        """The same, except that the runs `documents` take no slots and no positions."""
        runs = [replace(run, placed=i not in documents) for i, run in enumerate(self.runs)]
        return _placed(runs, self.ranking, self.shared)

    def followed_by(self, ids: tuple[int, ...]) -> Placement:
        """The same with inline ids behind it."""
        if not ids:
            return self
        return Placement((*self.runs, Run(ids)), (*self.starts, self.tokens), self.ranking, self.shared)

    def documents(self) -> list[int]:
        """Indices of the runs that are documents."""
        return [i for i, run in enumerate(self.runs) if run.document is not None]

    def reordered(self, documents: Sequence[int]) -> Placement:
        """The same with the documents of the runs `documents` in that order at the documents' places."""
        places = self.documents()
        ordered = list(self.runs)
        for place, source in zip(places, documents, strict=True):
            ordered[place] = self.runs[source]
        now = dict(zip(documents, places, strict=True))
        return _placed(ordered, tuple(now[i] for i in self.ranking), self.shared)


def place_runs(
    runs: Sequence[Run], order: Order = Order.GIVEN, ranking: Sequence[int] = (), moved: int = 1
) -> Placement:
    """Place `runs` one behind the other.

    Args:
        ranking: indices among the documents, the retriever's best first.
        moved: how many of the best ones `TARGET_LAST` moves to the last documents' places, the best last; the
            others move up, inline text stays where it is. `DENSITY_ASCENDING` starts as given: its order is known
            only once a selector has seen the prompt.
    """
    runs = list(runs)
    if order is Order.DOCUMENTS_FIRST:
        runs.sort(key=lambda run: run.document is None)
    places = [i for i, run in enumerate(runs) if run.document is not None]
    placement = _placed(runs, tuple(places[n] for n in ranking), order is Order.SHARED_POSITIONS)
    if order is Order.TARGET_LAST and ranking:
        last = placement.ranking[:moved][::-1]
        return placement.reordered([*(i for i in places if i not in last), *last])
    return placement


def _placed(runs: Sequence[Run], ranking: tuple[int, ...], shared: bool) -> Placement:
    starts = tuple(accumulate((len(run.rows) for run in runs), initial=0))[:-1]
    return Placement(tuple(runs), starts, ranking, shared)
