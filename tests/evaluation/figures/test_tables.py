"""A summary as text: what stands in the cells, and what is said of them."""

from __future__ import annotations

import pytest

from kvquilt.evaluation.figures.statistics import Interval
from kvquilt.evaluation.figures.summarising import summarise
from kvquilt.evaluation.figures.summary import Summary
from kvquilt.evaluation.figures.tables import tables, verdict
from kvquilt.evaluation.run.run import Finished
from tests.evaluation.figures.test_summarising import finished, line


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise(finished(), resamples=500)


def cells(summary: Summary, title: str, arm: str) -> dict[str, str]:
    table = next(each for each in tables(summary, "contains_em") if each.title.startswith(title))
    return dict(zip(table.head, next(row for row in table.rows if row[0].startswith(arm)), strict=True))


def test_cells_are_the_summary_in_words(summary: Summary) -> None:
    far = cells(summary, "How far", "epic:k=2")
    assert (far["KL"], far["top-1"], far["KL recovered"]) == ("0.875 [0.500, 1.625]", "0.500", "75.0%")
    answers = cells(summary, "Answers", "epic:k=2")
    assert (answers["to full"], answers["outcome"]) == ("-0.167 [-0.500, +0.500]", "tie (+1 -2)")
    damage = cells(summary, "Damage", "epic:k=2")
    assert (damage["|D|"], damage["damage"], damage["collateral"]) == ("4", "50.0% [50.0%, 50.0%]", "100.0%")
    work = cells(summary, "Work", "epic:k=2")
    assert (work["charged"], work["first token"], work["fallbacks"]) == ("10.0%", "0.25", "not_prepared 1")


def test_an_arm_without_a_value_has_no_row_and_a_missing_floor_is_said(summary: Summary) -> None:
    far = tables(summary, "contains_em")[0]
    assert "full" not in [row[0] for row in far.rows]
    assert far.notes == ("No noise floor: the run has no full-again.",)


def test_a_floor_below_three_digits_is_still_a_number() -> None:
    lines = [
        line("none", n, method="full-again") | {"fidelity": {"self": {"kl": [2e-7] * 2, "agree": [1.0] * 2},
         "gold": {"kl": [0.0] * 2, "agree": [1.0] * 2, "nll": [1.0, 2.0]}}}
        for n in range(6)
    ]  # fmt: skip
    found = summarise(Finished((*finished().lines, *lines), {}), resamples=100)
    floor = cells(found, "How far", "full-again (noise floor)")
    assert (floor["KL"], floor["KL p95"]) == ("2e-07 [2e-07, 2e-07]", "2e-07")
    assert tables(found, "contains_em")[0].notes == ()


def test_what_a_task_is_worth_is_said_first(summary: Summary) -> None:
    assert "do not clearly help" in verdict(summary.documents_help)
    assert verdict(Interval(0.5, 0.25, 0.75)) == (
        "The documents help: full prefill scores 0.500 [0.250, 0.750] above no context."
    )
    assert "was not measured" in verdict(None)
