"""Exact tests of paired answers, and what several tests at once are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvquilt.errors import InputError


def mcnemar(only_one: int, only_other: int) -> float:
    """Two-sided p of right and wrong in pairs: the items that only one arm gets right against those of the other.

    ``min(1, 2 P(X <= min))``, X binomial with probability 1/2: exact, in whole numbers. 1 where the arms never differ.

    Raises:
        InputError: a negative count.
    """
    for name, count in (("only_one", only_one), ("only_other", only_other)):
        if count < 0:
            raise InputError(name, "at least 0", count)
    n = only_one + only_other
    ways = sum(math.comb(n, k) for k in range(min(only_one, only_other) + 1))
    return min(2 * ways, 1 << n) / (1 << n)


def discordant(one: Sequence[float], other: Sequence[float], right_from: float = 1.0) -> tuple[int, int]:
    """How many items only `one` gets right, and how many only `other`: what `mcnemar` compares.

    Raises:
        InputError: of different length.
    """
    _check_pairs(one, other)
    pairs = [(a >= right_from, b >= right_from) for a, b in zip(one, other, strict=True)]
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)


def wilcoxon(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p of the signed-rank test on paired values, such as each group's mean KL under two arms.

    Exact: the distribution of the rank sum over all signs, equal differences sharing their mean rank. Pairs without a
    difference are left out; 1 where none is left.

    Raises:
        InputError: of different length, or not finite.
    """
    _check_pairs(one, other)
    differences = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    if not np.isfinite(differences).all():
        raise InputError("values", "must be finite")
    differences = differences[differences != 0]
    sizes = np.abs(differences)
    # twice the mean rank of equals is a whole number: those below, and those not above, plus one
    ranks = (sizes[None] < sizes[:, None]).sum(1) + (sizes[None] <= sizes[:, None]).sum(1) + 1
    chances = np.zeros(int(ranks.sum()) + 1)  # of every sum of the positive ones' ranks
    chances[0] = 1.0
    for rank in ranks:
        chances[rank:] = (chances[rank:] + chances[:-rank]) / 2
        chances[:rank] /= 2
    seen = int(ranks[differences > 0].sum())
    return min(1.0, 2 * min(float(chances[: seen + 1].sum()), float(chances[seen:].sum())))


def holm(family: Mapping[str, float]) -> dict[str, float]:
    """p of each test of a family as Holm's step-down procedure adjusts it: below 0.05 is significant at 5 % in all.

    The family is named before anything is measured; tests that were not planned do not join it later.

    Raises:
        InputError: a p outside 0 to 1.
    """
    for name, p in family.items():
        if not 0 <= p <= 1:
            raise InputError(name, "must lie between 0 and 1", p)
    adjusted, highest = dict(family), 0.0
    for done, name in enumerate(sorted(family, key=family.__getitem__)):
        highest = max(highest, min(1.0, (len(family) - done) * family[name]))
        adjusted[name] = highest
    return adjusted


def _check_pairs(one: Sequence[float], other: Sequence[float]) -> None:
    if len(one) != len(other):
        raise InputError("pairs", f"must be of equal number, {len(one)}", len(other))
