"""A metric is a score, a form and what counts as right, by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.grading import FORMS, GRADERS, Metric


def test_the_form_is_taken_before_the_score() -> None:
    said = "She was born in Amberford."
    assert Metric("squad_em", "bare_value").score(said, ["Amberford"]) == 1.0
    assert Metric("squad_em").score(said, ["Amberford"]) == 0.0
    assert Metric("squad_em", "marked").score("Maybe. Answer: yes", ["yes"]) == 1.0


def test_right_is_at_the_threshold() -> None:
    assert Metric("squad_f1", right=0.5).is_right("amber coast river sea", ["amber", "amber coast hill sand"])
    assert not Metric("squad_f1", right=0.51).is_right("amber coast river sea", ["amber coast hill sand"])
    assert not Metric("recall").is_right("one", ["one, two"])


def test_yes_and_no_of_hotpotqa() -> None:
    assert Metric("hotpotqa_f1").score("yes it was", ["yes"]) == 0.0
    assert Metric("squad_f1").score("yes it was", ["yes"]) == 0.5


@pytest.mark.parametrize("grader", GRADERS)
@pytest.mark.parametrize("form", FORMS)
def test_every_score_is_a_share(grader: str, form: str) -> None:
    metric = Metric(grader, form)
    for said in ("", "answer: Amber", "amber, river", "is amber?"):
        assert 0 <= metric.score(said, ["amber", "river"]) <= 1
    assert metric.score("", ["amber"]) == 0


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"grader": "contains"}, "did you mean 'contains_em'"),
        ({"grader": "recall", "form": "bear"}, "did you mean 'bare'"),
        ({"grader": "recall", "right": 2}, "right: must be a number from 0 to 1"),
        ({"grader": "recall", "right": 0}, "right: must be above 0"),
    ],
)
def test_names_are_checked(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        Metric(**wrong)
