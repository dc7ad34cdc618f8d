"""Tests of pairs against published tables and counted cases."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.figures.significance import discordant, holm, mcnemar, wilcoxon


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 0, 1.0),
        (1, 1, 1.0),  # 2 * 3/4 is more than 1
        (0, 1, 1.0),
        (6, 0, 2 / 64),
        (5, 0, 2 / 32),
        (9, 1, 2 * 11 / 1024),
        (1, 9, 2 * 11 / 1024),
        (2, 8, 2 * 56 / 1024),
    ],
)
def test_mcnemar_counts_the_ways(b: int, c: int, p: float) -> None:
    assert mcnemar(b, c) == p


@pytest.mark.parametrize(("more", "fewer"), [(6, 0), (8, 1), (12, 3), (15, 5), (21, 9), (27, 13)])
def test_the_smallest_majorities_that_are_significant_at_5_percent(more: int, fewer: int) -> None:
    assert mcnemar(more, fewer) < 0.05 <= mcnemar(more - 1, fewer)


def test_mcnemar_is_exact_where_floats_would_not_be() -> None:
    assert mcnemar(2000, 0) == 0.0  # 2^-1999 is below the smallest float
    assert mcnemar(1000, 1000) == 1.0
    with pytest.raises(InputError, match="only_other"):
        mcnemar(1, -1)


def test_pairs_that_differ() -> None:
    assert discordant([1, 1, 0, 0, 1], [1, 0, 1, 0, 0]) == (2, 1)
    assert discordant([0.6, 0.4], [0.4, 0.5], right_from=0.5) == (1, 1)
    with pytest.raises(InputError, match="pairs"):
        discordant([1], [])


def test_signed_ranks_against_every_sign() -> None:
    rng = np.random.default_rng(0)
    for n in range(1, 9):
        values = rng.integers(-4, 5, size=n).astype(float)  # equals, and pairs without a difference
        left = values[values != 0]
        order = np.sort(np.abs(left))
        ranks = [(np.searchsorted(order, a, "left") + np.searchsorted(order, a, "right") + 1) / 2 for a in np.abs(left)]
        sums = [sum(r for r, s in zip(ranks, signs, strict=True) if s) for signs in product((0, 1), repeat=len(left))]
        seen = sum(r for r, v in zip(ranks, left, strict=True) if v > 0)
        below = sum(s <= seen for s in sums) / len(sums)
        above = sum(s >= seen for s in sums) / len(sums)
        assert wilcoxon(values.tolist(), [0.0] * n) == pytest.approx(min(1.0, 2 * min(below, above)))


def test_signed_ranks_of_known_tables() -> None:
    # n = 6, all of one sign: 2 / 2^6; n = 10, the smaller rank sum 8 is the last one with p below 5 %
    assert wilcoxon([1, 2, 3, 4, 5, 6], [0] * 6) == pytest.approx(2 / 64)
    eight = [-1, 2, 3, 4, 5, 6, -8, 9, 10, 11]  # ranks 1 and 7 are negative
    nine = [1, -2, 3, 4, 5, 6, -8, 9, 10, 11]
    assert wilcoxon(eight, [0] * 10) == pytest.approx(50 / 1024)
    assert wilcoxon(nine, [0] * 10) > 0.05
    assert wilcoxon([1, 2], [1, 2]) == 1.0
    assert wilcoxon([], []) == 1.0
    with pytest.raises(InputError, match="finite"):
        wilcoxon([float("nan")], [0])


def test_holm_steps_down() -> None:
    # sorted .01 .02 .03 .04: x4 = .04, x3 = .06, x2 = .06, x1 = .04, and none below the one before it
    found = holm({"d": 0.04, "a": 0.01, "c": 0.03, "b": 0.02})
    assert list(found) == ["d", "a", "c", "b"]
    assert found == {
        "a": pytest.approx(0.04),
        "b": pytest.approx(0.06),
        "c": pytest.approx(0.06),
        "d": pytest.approx(0.06),
    }
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({"a": 0.03}) == {"a": 0.03}
    assert holm({}) == {}
    with pytest.raises(InputError, match="a: "):
        holm({"a": 1.5})
