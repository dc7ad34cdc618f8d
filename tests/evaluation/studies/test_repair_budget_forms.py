"""Folders of a study of the repair budget with any field gone or of another form: named damage, or figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError, IntegrityError
from kvquilt.evaluation.figures.summarising import summarise
from kvquilt.evaluation.studies import repair_budget_figures
from kvquilt.evaluation.studies.repair_budget_figures import figures
from kvquilt.evaluation.studies.repair_budget_plot import pictures
from kvquilt.evaluation.studies.repair_budget_text import markdown
from tests.evaluation.run.test_broken_files import changed, places
from tests.evaluation.run.test_line_forms import STRANGE
from tests.evaluation.studies.test_repair_budget_figures import BEST, KL, evaluation, line, tuning, write

ARMS = ("full", "no-context", "none")
SIDE = {"l2": [0.5, 0.25], "cosine": [1.0, 0.5]}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(repair_budget_figures, "summarise", lambda finished: summarise(finished, resamples=20))
    cell = {"structure": "I2", "distractors": 1, "place": "last"}
    lines = [line(n, arm, 0.5, arm == "full") for n in range(2) for arm in ARMS]
    shared = {"of": "t", "measures": "arms"}
    write(tmp_path / "structure/t/one", {**shared, "part": "structure", **cell}, lines, list(ARMS))
    given = {"insert:others=1,seed=0": 1}
    more = [line(n, arm, 0.5) for n in range(2) for arm in (*ARMS, *given)]
    write(tmp_path / "attribution/t", {**shared, "part": "attribution", "given": given}, more, [*ARMS, *given])
    tuning(tmp_path, "t", KL)
    evaluation(tmp_path, "t", {"full": "++", "no-context": "--", "none": "--", BEST: "++"})
    write(tmp_path / "context/t/answers", {**shared, "part": "context"}, lines, list(ARMS))
    apart = [
        {"item": f"q{n}", "group": "g", "arms": {"none": {"keys": SIDE, "values": SIDE}, "x": {"refused": "why"}}}
        for n in range(2)
    ]
    for each in apart:
        each["tokens"] = 7
    write_lines(tmp_path / "context/t/distances", "context", "distances", apart)
    hits = [{"item": "q0", "group": "g", "gold": [1], "scores": {"attention mass": [0.5, 0.5], "BM25": [1.0, 2.0]}}]
    write_lines(tmp_path / "retrieval/t", "retrieval", "hits", hits)
    return tmp_path


def write_lines(folder: Path, part: str, measures: str, lines: list[dict[str, Any]]) -> None:
    """A setting whose lines are items, so that they have no arms."""
    write(folder, {"part": part, "of": "t", "measures": measures}, lines, ["none"])


def told(study: Path) -> None:
    found = figures(study)
    json.dumps({**found, "about": {}}, allow_nan=False)
    markdown(found)


FOLDERS = (
    "structure/t/one", "attribution/t", "budget/t/tuning", "budget/t/evaluation", "context/t/answers",
    "context/t/distances", "retrieval/t",
)  # fmt: skip


def test_the_study_is_whole(study: Path) -> None:
    found = figures(study)
    assert found["unfinished"] == []
    assert all(len(found[part]) == 1 for part in ("structure", "attribution", "budget", "context", "retrieval"))
    assert found["context"][0]["distances"]["none"]["keys"] == SIDE
    assert set(pictures(found)) == {"structure.png", "budget.png", "context.png"}


@pytest.mark.parametrize("name", FOLDERS)
def test_damage_is_named_or_does_not_matter(study: Path, name: str) -> None:
    for file, which in (("run.json", 0), ("lines.jsonl", -1)):
        path = study / name / file
        whole = path.read_text()
        rows = whole.splitlines()
        good, named = json.loads(rows[which]), 0
        for at in places(good):
            for new in STRANGE:
                path.write_text("\n".join([*rows[:-1], json.dumps(changed(good, at, new))]) + "\n")
                try:
                    told(study)
                except (InputError, IntegrityError) as error:
                    named += str(path) in str(error)
        assert named > 10
        path.write_text(whole)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("context/t/distances", {"arms": {"none": {"refused": "why"}}}, "line 2 is damaged: arms, which are not those"),
        ("context/t/distances", {"arms": {"none": {"keys": {"l2": [1.0], "cosine": [1.0]}, "values": SIDE},
                                          "x": {"refused": "why"}}}, "line 2 is damaged: arms, which are not all of"),
        ("retrieval/t", {"gold": [2]}, "line 1 is damaged, or of another version"),
        ("retrieval/t", {"scores": {"BM25": [1.0, 2.0]}}, "line 1 is damaged, or of another version"),
    ],
)  # fmt: skip
def test_lines_that_do_not_fit_each_other(study: Path, name: str, change: dict[str, Any], says: str) -> None:
    path = study / name / "lines.jsonl"
    *rows, last = path.read_text().splitlines()
    path.write_text("\n".join([*rows, json.dumps({**json.loads(last), **change})]) + "\n")
    with pytest.raises(IntegrityError, match=says):
        figures(study)
