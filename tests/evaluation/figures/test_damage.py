"""Damage, recovery and collateral against counted questions and their identity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvquilt.errors import InputError
from kvquilt.evaluation.figures.damage import Damage, damage_base, damage_intervals, damage_of
from kvquilt.evaluation.figures.statistics import Bootstrap, Interval

# question by question:                 D      D      D      D     no      no     no     no
FULL, WITHOUT = [True, True, True, True, True, False, False, False], [False] * 4 + [True, False, True, False]
NONE = [True, True, False, False, True, False, True, False]


def test_the_base_is_what_documents_make_right() -> None:
    assert damage_base(FULL, WITHOUT) == [True] * 4 + [False] * 4


def test_shares_of_a_counted_arm() -> None:
    #     in D: kept, lost; regained, still lost
    arm = [True, False, True, False, False, True, True, False]
    found = damage_of(arm, FULL, WITHOUT, NONE)
    assert found == Damage(base=4, damage=0.5, recovery=0.5, collateral=0.5, gains=2, accuracy=0.5)
    assert not found.claims


def test_of_pure_reuse_and_of_full_prefill() -> None:
    assert damage_of(NONE, FULL, WITHOUT, NONE) == Damage(4, 0.5, 0.0, 0.0, 1, 0.5)
    assert damage_of(FULL, FULL, WITHOUT, NONE) == Damage(4, 0.0, 1.0, 0.0, 0, 0.625)


def test_shares_of_nothing_are_none() -> None:
    empty = damage_of([True, False], [False, True], [False, True], [True, True])
    assert empty == Damage(0, None, None, None, 1, 0.5)
    kept = damage_of([True], [True], [False], [True])
    assert (kept.damage, kept.recovery, kept.collateral) == (0.0, None, 0.0)
    lost = damage_of([True], [True], [False], [False])
    assert (lost.damage, lost.recovery, lost.collateral) == (0.0, 1.0, None)


def test_intervals_are_of_the_same_shares_and_draw_whole_groups() -> None:
    # four groups of two questions in D; reuse loses one of each, the arm regains both or neither
    full, without = [True] * 8, [False] * 8
    none, arm = [True, False] * 4, [True, True, True, False, True, True, True, False]
    found = damage_intervals(Bootstrap(list("aabbccdd"), resamples=4000), arm, full, without, none)
    shares = damage_of(arm, full, without, none)
    assert found.damage == Interval(pytest.approx(shares.damage), 0.0, 0.5)
    assert found.recovery == Interval(pytest.approx(shares.recovery), 0.0, 1.0)
    assert found.collateral == Interval(0.0, 0.0, 0.0)


def test_there_is_no_interval_where_draws_hold_no_question_of_the_base() -> None:
    draws = Bootstrap(list("abc"), resamples=1000)
    found = damage_intervals(draws, [False] * 3, [True, False, False], [False] * 3, [False] * 3)
    assert (found.damage, found.recovery, found.collateral) == (None, None, None)
    with pytest.raises(InputError, match="groups"):
        damage_intervals(draws, [True], [True], [True], [True])


def test_thirty_questions_carry_a_claim() -> None:
    for count, claims in ((29, False), (30, True)):
        right, wrong = [True] * count, [False] * count
        assert damage_of(right, right, wrong, wrong).claims is claims


@given(st.lists(st.tuples(*[st.booleans()] * 4), min_size=1, max_size=60))
def test_damage_is_what_reuse_lost_and_was_not_regained_and_what_was_lost_anew(rows: list[tuple[bool, ...]]) -> None:
    arm, full, without, none = (list(column) for column in zip(*rows, strict=True))
    found, reuse = damage_of(arm, full, without, none), damage_of(none, full, without, none)
    if found.damage is None or reuse.damage is None:
        assert found.base == 0
        return
    still = reuse.damage * (1 - (found.recovery or 0.0))
    anew = (1 - reuse.damage) * (found.collateral or 0.0)
    assert found.damage == pytest.approx(still + anew)
    assert (found.recovery is None) == (reuse.damage == 0)
    assert (found.collateral is None) == (reuse.damage == 1)


def test_questions_are_the_same_everywhere() -> None:
    with pytest.raises(InputError, match="without"):
        damage_of([True], [True], [], [True])
    with pytest.raises(InputError, match="arm"):
        damage_of([], [], [], [])
