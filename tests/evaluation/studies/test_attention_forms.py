"""A study of attention with any field of its lines gone or of another form: damage that is named, or a summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError, IntegrityError
from kvquilt.evaluation.studies.attention_run import AttentionRun
from kvquilt.evaluation.studies.attention_summary import summarise_attention
from kvquilt.evaluation.tasks.item import Item
from tests.engines import documents, make_engine
from tests.evaluation.run.test_broken_files import changed, places
from tests.evaluation.run.test_line_forms import STRANGE
from tests.evaluation.studies.test_attention_run import line, written

ROWS = [line("a", "none", 1.0), line("a", "new", 0.5), line("b", "none", 1.0), line("b", "new", 0.5)]


def damaged(folder: Path, which: int, row: dict[str, Any]) -> None:
    rows = [{"refused": None, **each} for each in ROWS]
    rows[which] = row
    (folder / "lines.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))


@pytest.mark.parametrize("which", [0, 3])
def test_a_line_of_another_form_is_named_with_its_field_or_does_not_matter(tmp_path: Path, which: int) -> None:
    written(tmp_path, *ROWS)
    good, named = {"refused": None, **ROWS[which]}, set()
    for at in places(good):
        for new in STRANGE:
            damaged(tmp_path, which, changed(good, at, new))
            try:
                summarise_attention(tmp_path)
            except IntegrityError as error:
                where, _, field = str(error).partition(" is damaged")
                named |= {name for name in good if name in field and where.startswith(f"{tmp_path}/lines.jsonl: line ")}
    assert named == good.keys()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("raw", [[[None, 1.0]]], "line 4 is damaged, or of another version: raw.0.0"),
        ("cosine", [[None, None]], "line 4 is damaged: cosine, which is not of 1 layers and 1 heads"),
        ("interior", [2.0, 2.0], "line 4 is damaged: interior, which is not of 1 layers"),
        ("item", "a", "line 4 is damaged: item and method had a line before"),
    ],
)
def test_lines_that_do_not_fit_each_other(tmp_path: Path, field: str, value: Any, says: str) -> None:
    written(tmp_path, *ROWS)
    damaged(tmp_path, 3, {"refused": None, **ROWS[3], field: value})
    with pytest.raises(IntegrityError, match=says):
        summarise_attention(tmp_path)


def test_what_run_json_says_is_checked_too(tmp_path: Path) -> None:
    written(tmp_path, *ROWS)
    path = tmp_path / "run.json"
    good = {
        "run": {"kind": "attention"},
        "about": {},
        "controls": {"new": [{"name": "c", "passed": True, "value": 0.0, "limit": 1.0}]},
    }
    path.write_text(json.dumps(good))
    assert len(summarise_attention(tmp_path).arms) == 2
    named = 0
    for at in places(good):
        for new in STRANGE:
            path.write_text(json.dumps(changed(good, at, new)))
            try:
                summarise_attention(tmp_path)
            except (InputError, IntegrityError) as error:
                named += str(tmp_path) in str(error)
    assert named > 50


def test_a_study_does_not_go_on_behind_a_damaged_line(tmp_path: Path) -> None:
    item = Item("item-0", tuple(documents(2)), "What does it do?", ("It",), (0,), "g", "topics")
    with make_engine() as engine:
        study = AttentionRun(engine, [item], (), tmp_path)
        study.go()
        path = tmp_path / "lines.jsonl"
        first, *rest = path.read_text().splitlines()
        path.write_text("\n".join([json.dumps({**json.loads(first), "seen": "all"}), *rest]) + "\n")
        with pytest.raises(IntegrityError, match="line 1 is damaged, or of another version: seen"):
            study.go()
