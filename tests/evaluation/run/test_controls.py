"""Controls of a run: every arm has its own answer, and what two arms share is computed once."""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.evaluation.run import controls as run_controls
from kvquilt.evaluation.run.arms import find_arms
from kvquilt.evaluation.run.controls import failed, tried
from kvquilt.evaluation.tasks.item import Item
from kvquilt.repair import operator
from tests.engines import documents, make_engine

ITEM = Item("item", tuple(documents(3)), "What does the statement do?", ("It",), (1,), "group", "topics")
ALIKE = ("none", "epic:k=2", "random:seed=1,5%", "insert:target", "attended:retrieved-document:5%,order=given")
OTHERS = ("retrieved-document", "recompute:target", "epic:k=2,writer=neighbours", "ape")


def test_what_arms_share_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = run_controls.check_method, []

    def counted(*arguments: Any) -> Any:
        asked.append(arguments[1].name)
        return made(*arguments)

    monkeypatch.setattr(run_controls, "check_method", counted)
    found = tried(make_engine(), ITEM, find_arms([*ALIKE, *OTHERS, "full-again"]))
    assert list(found) == ["full", *ALIKE, *OTHERS]
    assert len(asked) == 1 + len(OTHERS)
    assert all(found[name] == found["none"] for name in ALIKE)
    assert [check["name"] for check in found["none"]] == ["self-transfer", "all rows"]
    assert failed(found) == {}


def test_a_failure_is_that_of_every_arm_that_shares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, placed = make_engine(), operator.place
    arms = find_arms(["none", "epic:k=2"])
    monkeypatch.setattr(run_controls, "check_endpoints", lambda *_: [])
    monkeypatch.setattr(operator, "place", lambda segment, at, tables, out: placed(segment, at + 1, tables, out))
    wrong = failed(tried(engine, ITEM, arms))
    assert list(wrong) == ["none", "epic:k=2"]
    assert all("self-transfer" in why for why in wrong.values())
