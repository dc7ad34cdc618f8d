"""Aggregates of fidelity against counted rows."""

from __future__ import annotations

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.figures.answer_fidelity import Divergence, divergence, kl_recovery, nll_gap


def test_divergence_of_counted_rows() -> None:
    found = divergence([0.0, 4.0, 1.0, 2.0, 3.0], [1, 0, 1, 1, 0])
    # ascending 0 1 2 3 4: 95 % lies at 0.95 * 4 = 3.8 steps
    assert found == Divergence(rows=5, mean=2.0, median=2.0, p95=pytest.approx(3.8), max=4.0, top1=0.6)
    assert divergence([0.25], [1.0]) == Divergence(1, 0.25, 0.25, 0.25, 0.25, 1.0)


def test_recovery_compares_means() -> None:
    assert kl_recovery([0.5, 0.5], [1.5, 0.5]) == pytest.approx(0.5)
    assert kl_recovery([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert kl_recovery([0.0, 0.0], [1.0, 2.0]) == 1.0
    assert kl_recovery([3.0], [1.0]) == pytest.approx(-2.0)
    assert kl_recovery([0.1], [1e-8]) is None


def test_gap_is_a_mean_of_differences() -> None:
    assert nll_gap([2.0, 1.0, 3.0], [1.0, 1.5, 2.0]) == pytest.approx(0.5)
    assert nll_gap([1.0], [2.0]) == pytest.approx(-1.0)


def test_rows_are_the_same_on_both_sides() -> None:
    with pytest.raises(InputError, match="kl"):
        divergence([], [])
    with pytest.raises(InputError, match="kl"):
        divergence([float("nan")], [1.0])
    with pytest.raises(InputError, match="agree"):
        divergence([1.0, 2.0], [1.0])
    with pytest.raises(InputError, match="pure reuse"):
        kl_recovery([1.0], [1.0, 2.0])
    with pytest.raises(InputError, match="full prefill"):
        nll_gap([1.0], [1.0, 2.0])
