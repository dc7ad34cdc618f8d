"""Lines of a finished run by arm and item, and statistics of some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvquilt.errors import InputError
from kvquilt.evaluation.figures.statistics import Bootstrap, Statistic, mean_of, share_of
from kvquilt.evaluation.run.arms import FULL
from kvquilt.evaluation.run.folder import Line


@dataclass(frozen=True, eq=False, slots=True)
class RunLines:
    """`arms`: name -> item -> line; `seed` and `resamples` are those of every interval."""

    arms: Mapping[str, Mapping[str, Line]]
    seed: int
    resamples: int
    _draws: dict[tuple[str, ...], Bootstrap] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, lines: Sequence[Line], seed: int, resamples: int) -> RunLines:
        """Raises `InputError`: no lines, or items that lack an arm."""
        arms: dict[str, dict[str, Line]] = {}
        for line in lines:
            arms.setdefault(line["method"], {})[line["item"]] = line
        full = arms.get(FULL, {})
        if not full or any(each.keys() != full.keys() for each in arms.values()):
            raise InputError("lines", "must be those of a finished run, all arms on all items")
        return cls(arms, seed, resamples)

    def ran(self, name: str) -> list[Line]:
        """An arm's lines on the items that it could run on."""
        return [line for line in self.arms[name].values() if line["refused"] is None]

    def same(self, name: str, lines: Sequence[Line]) -> list[Line] | None:
        """Another arm's lines on the same items; None where it is not there, or could not run on one of them."""
        if name not in self.arms:
            return None
        other = [self.arms[name][line["item"]] for line in lines]
        return None if any(line["refused"] is not None for line in other) else other

    def answering(self, name: str, lines: Sequence[Line]) -> list[Line] | None:
        """The same of an arm that gives answers."""
        other = self.same(name, lines)
        return None if other is None or other[0]["score"] is None else other

    def bootstrap(self, lines: Sequence[Line]) -> Bootstrap:
        """The draws of these lines' groups, the same for every arm."""
        groups = tuple(line["group"] for line in lines)
        if groups not in self._draws:
            self._draws[groups] = Bootstrap(groups, self.seed, self.resamples)
        return self._draws[groups]


def scores(lines: Sequence[Line]) -> Statistic:
    return mean_of([line["score"] for line in lines])


def mean_kl(lines: Sequence[Line]) -> Statistic:
    """Over rows, so that items count by the length of full prefill's answer."""
    kept = [line["fidelity"]["self"]["kl"] for line in lines]
    return share_of([sum(rows) for rows in kept], [len(rows) for rows in kept])


def right(lines: Sequence[Line]) -> list[bool]:
    return [bool(line["right"]) for line in lines]
