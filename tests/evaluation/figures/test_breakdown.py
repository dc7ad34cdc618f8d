"""Kinds and groups of hand-made lines, and answers without a marker."""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.evaluation.figures.statistics import Interval
from kvquilt.evaluation.figures.summarising import summarise
from kvquilt.evaluation.figures.summary import PartScore, Summary
from kvquilt.evaluation.figures.tables import Table, tables
from kvquilt.evaluation.run.run import Finished
from tests.evaluation.figures.test_summarising import RIGHT, finished, line, of

KINDS = {f"item-{n}": "bridge" if n < 3 else "comparison" for n in range(6)}


def table(summary: Summary, title: str) -> Table:
    return next(each for each in tables(summary, "f1") if each.title == title)


def test_scores_and_damage_by_kind() -> None:
    found = summarise(finished(), resamples=500, kinds=KINDS)
    bridge, comparison = found.by_kind
    assert [(part.name, part.items) for part in found.by_kind] == [("bridge", 3), ("comparison", 3)]
    assert list(bridge.arms) == list(RIGHT)
    # items 0 to 2 stand in two groups; all are right under full prefill and wrong without documents
    assert bridge.arms["epic:k=2"] == PartScore(3, pytest.approx(2 / 3), Interval(pytest.approx(2 / 3), 0.5, 1.0), 3, 1)
    assert bridge.arms["none"] == PartScore(3, pytest.approx(1 / 3), Interval(pytest.approx(1 / 3), 0.0, 0.5), 3, 2)
    assert (comparison.arms["epic:k=2"].base, comparison.arms["epic:k=2"].lost) == (1, 1)
    scores, lost = table(found, "By kind (f1)"), table(found, "Damage by kind")
    assert scores.head == ("arm", "bridge (3)", "comparison (3)")
    assert {row[0]: row[1] for row in scores.rows}["none"] == "0.333 [0.000, 0.500]"
    assert {row[0]: row[1:] for row in lost.rows}["epic:k=2"] == ("1 of 3", "1 of 1")
    three = summarise(finished(), resamples=500, kinds={**KINDS, "item-4": "yes or no"})
    assert [row[3] for row in table(three, "Damage by kind").rows] == ["-"] * 4, "it is right without documents"


def test_one_kind_is_no_breakdown_and_no_kind_is_one() -> None:
    assert summarise(finished(), resamples=100).by_kind == ()
    assert summarise(finished(), resamples=100, kinds=dict.fromkeys(KINDS, "bridge")).by_kind == ()
    some = summarise(finished(), resamples=100, kinds={"item-0": "bridge"}).by_kind
    assert [(part.name, part.items) for part in some] == [("bridge", 1), ("no kind", 5)]


def test_few_groups_are_printed_one_by_one() -> None:
    found = summarise(finished(), resamples=100)
    assert [(part.name, part.items) for part in found.by_group] == [("group-0", 2), ("group-1", 2), ("group-2", 2)]
    assert [part.arms["none"] for part in found.by_group] == [
        PartScore(2, 0.5, None, 2, 1), PartScore(2, 0.0, None, 2, 2), PartScore(2, 0.5, None, 0, 0)
    ]  # fmt: skip
    shown = table(found, "Group by group (f1)")
    assert {row[0]: row[1:] for row in shown.rows}["none"] == ("0.500", "0.000", "0.500")
    assert shown.notes[0].startswith("Fewer than 10 groups")
    many = [line(arm, n % 6, item=f"item-{n}", group=f"group-{n}") for n in range(10) for arm in RIGHT]
    assert summarise(Finished(tuple(many), {}), resamples=100).by_group == ()
    assert len(summarise(Finished(tuple(many[:36]), {}), resamples=100).by_group) == 9
    one = [line(arm, n, group="all") for n in range(2) for arm in RIGHT]
    assert summarise(Finished(tuple(one), {}), resamples=100).by_group == ()


def test_parts_leave_out_what_did_not_run_or_gave_no_answer() -> None:
    lines = list(finished(none=dict.fromkeys(("score", "right", "scores", "answer"))).lines)
    for n in (3, 7):  # epic in the first group
        lines[n] = lines[n] | dict.fromkeys(("score", "right", "scores", "fidelity", "ledger")) | {"refused": "why"}
    first, second, _ = summarise(Finished(tuple(lines), {}), resamples=100).by_group
    assert list(first.arms) == ["full", "no-context"]
    assert list(second.arms) == ["full", "no-context", "epic:k=2"]
    quiet = summarise(finished(**{"no-context": dict.fromkeys(("score", "right", "scores", "answer"))}), resamples=100)
    assert quiet.by_group[0].arms["full"].base is None


def test_a_table_has_no_more_columns_than_can_be_read() -> None:
    kinds = {f"item-{n}": f"kind-{n if n < 13 else 0:02}" for n in range(14)}
    many = [line(arm, n % 6, item=f"item-{n}", group=f"group-{n}") for n in range(14) for arm in RIGHT]
    found = summarise(Finished(tuple(many), {}), resamples=100, kinds=kinds)
    assert len(found.by_kind) == 13
    shown = table(found, "By kind (f1)")
    assert shown.head == ("arm", "kind-00 (2)", *(f"kind-{n:02} (1)" for n in range(1, 12)))
    assert shown.notes == ("The 12 with the most items, of 13.",)


def marked(arm: str, n: int, there: bool) -> dict[str, Any]:
    made = line(arm, n)
    return made | {"scores": {**made["scores"], "marked": there}}


def test_answers_without_a_marker_are_counted() -> None:
    lines = [marked(arm, n, not (arm == "none" and n < 2)) for n in range(6) for arm in RIGHT]
    found = summarise(Finished(tuple(lines), {}), resamples=100)
    reuse, full = of(found, "none").scored, of(found, "full").scored
    assert reuse is not None
    assert full is not None
    assert (reuse.unmarked, full.unmarked) == (2, 0)
    shown = table(found, "Answers (f1)")
    cells = dict(zip(shown.head, next(row for row in shown.rows if row[0] == "none"), strict=True))
    assert cells["no marker"] == "2 of 6"
    assert any(note.startswith("No marker:") for note in shown.notes)
    plain = summarise(finished(), resamples=100)
    assert of(plain, "none").scored.unmarked is None  # type: ignore[union-attr]
    assert "no marker" not in table(plain, "Answers (f1)").head
