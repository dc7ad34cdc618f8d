"""Paired bootstrap over groups: what an interval around a score or a difference is.

Items of one group (an article, a dialogue, a person) are not independent, so whole groups are drawn with replacement.
All arms see the same draws, which is what makes a difference of two arms a paired one. The intervals are percentiles;
with few groups they are too short: a handful of dialogues is better printed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.metrics import Counts

Floats = NDArray[np.float64]
_EDGES = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and where 95 % of its resampled values lie."""

    value: float
    low: float
    high: float


class Outcome(StrEnum):
    WIN = "win"
    TIE = "tie"
    LOSS = "loss"


def outcome(difference: Interval, higher_is_better: bool = True) -> Outcome:
    """What an arm's difference to another says: by the sign of the interval, not of the value."""
    if difference.low <= 0 <= difference.high:
        return Outcome.TIE
    return Outcome.WIN if (difference.low > 0) == higher_is_better else Outcome.LOSS


@dataclass(frozen=True, eq=False, slots=True)
class Statistic:
    """A score of a corpus that depends on sums over its items alone.

    Attributes:
        addends: ``[items, sums]``, one row per item.
        of: the score of sums ``[..., sums]``, ``[...]``; NaN where they do not determine one.
    """

    addends: Floats
    of: Callable[[Floats], Floats] = field(repr=False)


def mean_of(values: Sequence[float]) -> Statistic:
    """The mean over items."""
    return share_of(values, [1.0] * len(values))


def share_of(hits: Sequence[float], among: Sequence[float]) -> Statistic:
    """The sum of `hits` over the sum of `among`, such as lost questions among those that can be lost."""
    return Statistic(np.array([hits, among], dtype=np.float64).T.reshape(-1, 2), lambda s: _over(s[..., 0], s[..., 1]))


def micro_f1_of(counts: Sequence[Counts]) -> Statistic:
    """`micro_f1_bag`: words are summed over the items first. 0 where nothing is right."""
    addends = np.array([(c.tp, c.fp, c.fn) for c in counts], dtype=np.float64).reshape(-1, 3)

    def f1(sums: Floats) -> Floats:
        right = 2 * sums[..., 0]
        return np.where(right > 0, _over(right, right + sums[..., 1] + sums[..., 2]), 0.0)

    return Statistic(addends, f1)


@dataclass(frozen=True, eq=False, slots=True)
class Bootstrap:
    """Draws of the groups of some items, the same for every statistic over these items.

    Attributes:
        groups: of every item, in the items' order.
        resamples: how many times as many groups as there are are drawn.

    Raises:
        InputError: no items, no resamples.
    """

    groups: Sequence[Hashable]
    seed: int = 0
    resamples: int = 10_000
    _at: NDArray[np.int64] = field(init=False, repr=False)
    _times: Floats = field(init=False, repr=False)  # [resamples, groups]

    def __post_init__(self) -> None:
        if not self.groups:
            raise InputError("groups", "at least one item is needed")
        if self.resamples < 1:
            raise InputError("resamples", "at least 1", self.resamples)
        numbers: dict[Hashable, int] = {}
        at = np.array([numbers.setdefault(group, len(numbers)) for group in self.groups], dtype=np.int64)
        drawn = np.random.default_rng(self.seed).integers(len(numbers), size=(self.resamples, len(numbers)))
        drawn += np.arange(self.resamples)[:, None] * len(numbers)
        times = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        object.__setattr__(self, "_at", at)
        object.__setattr__(self, "_times", times.astype(np.float64))

    def level(self, arm: Statistic) -> Interval:
        """One arm's score.

        Raises:
            InputError: another number of items than of groups; a score that the items do not determine, or that a
                resample in twenty does not.
        """
        return _interval(*self._values(arm))

    def difference(self, arm: Statistic, other: Statistic) -> Interval:
        """``arm - other`` over the same draws; raises as `level`."""
        value, drawn = self._values(arm)
        less, drawn_less = self._values(other)
        return _interval(value - less, drawn - drawn_less)

    def _values(self, arm: Statistic) -> tuple[float, Floats]:
        """The score itself and of every draw."""
        if len(arm.addends) != len(self._at):
            raise InputError("items", f"must be as many as have groups, {len(self._at)}", len(arm.addends))
        sums = np.zeros((self._times.shape[1], arm.addends.shape[1]))
        np.add.at(sums, self._at, arm.addends)
        return float(arm.of(sums.sum(0))), arm.of(self._times @ sums)


def _interval(value: float, drawn: Floats) -> Interval:
    known = drawn[~np.isnan(drawn)]
    if np.isnan(value) or len(known) < 0.95 * len(drawn):
        raise InputError("items", "they do not determine this score, or too few of their resamples do")
    # of a sorted sample itself, no mean of two: a rare infinite value outside then changes nothing
    low, high = np.quantile(known, _EDGES, method="inverted_cdf")
    return Interval(value, float(low), float(high))


def _over(a: Floats, b: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(a, b)
