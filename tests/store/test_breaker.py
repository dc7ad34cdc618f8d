"""The circuit breaker: what opens it, and that only an answer closes it."""

from __future__ import annotations

import pytest

from kvquilt.store.breaker import Breaker, BreakerState


def breaker() -> tuple[Breaker, list[BreakerState]]:
    """One that opens after three failures, and the states in which it said that it opened."""
    told: list[BreakerState] = []
    made = Breaker(3, lambda: told.append(made.state))
    return made, told


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    made, told = breaker()
    for _ in range(2):
        made.failed(late=False)
        made.failed(late=False)
        made.succeeded(0.1)
    assert made.closed
    for _ in range(3):
        made.failed(late=False)
    assert made.state is BreakerState.OPEN
    assert told == [BreakerState.OPEN]


def test_one_used_up_deadline_is_enough() -> None:
    made, told = breaker()
    made.failed(late=True)
    assert made.state is BreakerState.OPEN
    assert made.openings == len(told) == 1


@pytest.mark.parametrize(("slow", "opens"), [(10, True), (9, False)])
def test_half_of_the_last_twenty_calls_being_slow_opens_it(slow: int, opens: bool) -> None:
    made, _ = breaker()
    for number in range(19):
        made.succeeded(0.9 if number < slow else 0.1)
        assert made.closed, "too few to tell"
    made.succeeded(0.5)
    assert made.closed is not opens


def test_what_was_under_way_when_it_opened_neither_opens_it_again_nor_closes_it() -> None:
    made, told = breaker()
    made.failed(late=True)
    made.failed(late=True)
    made.succeeded(0.1)
    assert made.state is BreakerState.OPEN
    assert len(told) == 1


def test_only_an_answer_closes_it() -> None:
    made, told = breaker()
    made.failed(late=True)
    made.try_again()
    assert made.state is BreakerState.HALF_OPEN
    assert not made.closed
    made.failed(late=True)
    made.settle(answered=False)
    assert made.state is BreakerState.OPEN
    made.try_again()
    made.settle(answered=True)
    assert made.closed
    made.failed(late=False)
    made.failed(late=False)
    assert made.closed, "failures from before do not count any more"
    made.failed(late=True)
    assert len(told) == made.openings == 2
