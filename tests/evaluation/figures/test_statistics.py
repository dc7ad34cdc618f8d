"""Intervals against closed forms and counted cases."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.figures.statistics import (
    Bootstrap,
    Interval,
    Outcome,
    mean_of,
    micro_f1_of,
    outcome,
    share_of,
)
from kvquilt.evaluation.tasks.metrics import Counts, micro_f1_bag


def test_two_groups_have_three_means_with_known_chances() -> None:
    # groups {0, 0} and {1, 1}: both drawn twice with 1/4 each, one of each with 1/2: 2.5 % and 97.5 % are the ends
    draws = Bootstrap(["a", "a", "b", "b"])
    assert draws.level(mean_of([0, 0, 1, 1])) == Interval(0.5, 0.0, 1.0)
    # items of one group never part, so their own difference cannot be seen
    assert draws.level(mean_of([0, 1, 0, 1])) == Interval(0.5, 0.5, 0.5)


def test_ends_are_those_of_all_resamples_counted() -> None:
    values, groups = [1.0, 2.0, 4.0, 8.0, 16.0], "abcde"
    every = sorted(sum(values[i] for i in chosen) / 5 for chosen in product(range(5), repeat=5))
    # 3,125 equally likely draws: the 79th and the 3,047th are the smallest with 2.5 % and 97.5 % at or below
    low, high = every[78], every[3046]
    found = Bootstrap(groups, seed=1, resamples=40_000).level(mean_of(values))
    assert found.value == pytest.approx(6.2)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.21), pytest.approx(high, abs=0.21))


def test_groups_of_unequal_size_are_weighted_by_their_items() -> None:
    # drawn a a: 3/3; a b: 3/4; b b: 0/1: the mean over drawn items, not over groups
    assert Bootstrap(["a", "a", "a", "b"]).level(mean_of([1, 1, 1, 0])) == Interval(0.75, 0.0, 1.0)


def test_a_difference_is_paired() -> None:
    rng = np.random.default_rng(0)
    hard = rng.normal(size=80) * 10
    draws = Bootstrap(range(80))
    one, other = mean_of(list(hard + 1)), mean_of(list(hard))
    assert draws.difference(one, other).low == pytest.approx(1.0)
    assert draws.difference(one, other).high == pytest.approx(1.0)
    level = draws.level(other)
    assert level.high - level.low > 2, "the arms themselves are uncertain"
    assert draws.difference(other, one).value == pytest.approx(-1.0)


def test_micro_f1_sums_what_was_drawn() -> None:
    counts = [Counts(2, 0, 0), Counts(1, 4, 1), Counts(0, 3, 2)]
    found = Bootstrap(["a", "a", "b"]).level(micro_f1_of(counts))
    assert found.value == pytest.approx(micro_f1_bag(counts))
    # a a: 2*6 / (2*6 + 8 + 2); b b: nothing is right
    assert (found.low, found.high) == (0.0, pytest.approx(12 / 22))
    assert Bootstrap("ab").level(micro_f1_of([Counts(), Counts()])) == Interval(0.0, 0.0, 0.0)


def test_a_share_is_of_its_own_items() -> None:
    # lost 1 of 2 in a, 0 of 1 in b; a a: 1/2, a b: 1/3, b b: 0
    found = Bootstrap(["a", "a", "a", "b"]).level(share_of([1, 0, 0, 0], [1, 1, 0, 1]))
    assert found == Interval(pytest.approx(1 / 3), 0.0, 0.5)
    with pytest.raises(InputError, match="do not determine"):
        Bootstrap("ab").level(share_of([0, 0], [0, 0]))
    with pytest.raises(InputError, match="do not determine"):  # a quarter of draws has none of them
        Bootstrap("ab").level(share_of([1, 0], [1, 0]))


def test_the_seed_decides() -> None:
    values = mean_of(list(range(30)))
    same = {Bootstrap(range(30), seed=3, resamples=500).level(values) for _ in range(2)}
    assert len(same) == 1
    assert Bootstrap(range(30), seed=4, resamples=500).level(values) not in same


def test_intervals_cover_the_truth_as_often_as_they_say_and_items_alone_would_not() -> None:
    rng = np.random.default_rng(7)
    groups = [g for g in range(40) for _ in range(5)]
    covered: Counter[str] = Counter()
    for seed in range(300):
        # items of a group share half of their variance; the truth is 0
        values = list(np.repeat(rng.normal(size=40), 5) + rng.normal(size=200))
        for name, by in (("groups", groups), ("items", list(range(200)))):
            found = Bootstrap(by, seed=seed, resamples=400).level(mean_of(values))
            covered[name] += found.low <= 0 <= found.high
    assert 0.91 <= covered["groups"] / 300 <= 0.98
    assert covered["items"] / 300 < 0.8


@pytest.mark.parametrize(
    ("low", "high", "higher", "lower"),
    [
        (0.1, 0.3, Outcome.WIN, Outcome.LOSS),
        (-0.3, -0.1, Outcome.LOSS, Outcome.WIN),
        (-0.1, 0.3, Outcome.TIE, Outcome.TIE),
        (0.0, 0.3, Outcome.TIE, Outcome.TIE),
        (0.0, 0.0, Outcome.TIE, Outcome.TIE),
    ],
)
def test_the_interval_decides_not_the_value(low: float, high: float, higher: Outcome, lower: Outcome) -> None:
    difference = Interval(0.2, low, high)
    assert (outcome(difference), outcome(difference, higher_is_better=False)) == (higher, lower)


def test_what_cannot_be_resampled_is_refused() -> None:
    with pytest.raises(InputError, match="groups"):
        Bootstrap([])
    with pytest.raises(InputError, match="resamples"):
        Bootstrap("a", resamples=0)
    with pytest.raises(InputError, match="items"):
        Bootstrap("ab").level(mean_of([1.0]))
