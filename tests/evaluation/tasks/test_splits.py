"""Groups of a file in two splits."""

from __future__ import annotations

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.splits import Divided, in_turns


def test_the_first_groups_tune() -> None:
    halves = Divided.of("abcd", 0.5)
    assert (halves.split("tuning"), halves.split("evaluation")) == (("a", "b"), ("c", "d"))
    assert Divided.of(range(10), 0.4).tuning == (0, 1, 2, 3)
    assert Divided.of("abcd", 0.5, "xyz") == Divided(("x", "y", "z"), ("a", "b", "c", "d"))


def test_an_empty_split_is_refused_when_it_is_asked_for() -> None:
    assert Divided.of("ab", 0.0).split("evaluation") == ("a", "b")
    with pytest.raises(InputError, match="split: has nothing in it"):
        Divided.of("ab", 0.0).split("tuning")
    with pytest.raises(InputError, match=r"split: must be one of tuning, evaluation \(got 'tuned'"):
        Divided.of("ab", 0.5).split("tuned")
    for share in (-0.1, 1.1, True, "half"):
        with pytest.raises(InputError, match="share: must be a number from 0 to 1"):
            Divided.of("ab", share)  # type: ignore[arg-type]


def test_groups_take_turns() -> None:
    assert in_turns(["abc", "d", "", "ef"]) == ["a", "d", "e", "b", "f", "c"]
    assert in_turns([[None, 1], [2]]) == [None, 2, 1]
    assert in_turns([]) == []
