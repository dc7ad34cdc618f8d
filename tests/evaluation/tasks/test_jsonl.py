"""A user's own questions: what a line may have, which lines belong together, errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError, LeakageError
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.jsonl import JsonlTask
from kvquilt.evaluation.tasks.leakage import check_apart


def row(n: int, **more: Any) -> dict[str, Any]:
    texts = [f"Hill {n} is {n} miles high.", {"text": f"Hill {n} is green.", "id": "green"}]
    return {"documents": texts, "question": f"How high is hill {n}?", "answers": [f"{n} miles", f"{n}"]} | more


def write(folder: Path, *rows: object, name: str = "own.jsonl") -> Path:
    path = folder / name
    path.write_text("\n\n".join(each if isinstance(each, str) else json.dumps(each) for each in rows), encoding="utf-8")
    return path


def test_a_line_is_an_item(tmp_path: Path) -> None:
    task = JsonlTask(write(tmp_path, row(0), row(1, id="one", gold=[0], group="hills", kind="height", more=7)))
    (first,), (second,) = (task.items(split) for split in task.splits)
    assert (first.id, first.group, first.gold, first.task) == ("line-1", "line-1", (), "jsonl")
    assert (first.question, first.answers) == ("How high is hill 0?", ("0 miles", "0"))
    assert [d.text for d in first.documents] == ["Hill 0 is 0 miles high.", "Hill 0 is green."]
    assert first.documents[0].id.startswith("doc-")
    assert first.documents[1].id == "green"
    assert (second.id, second.group, second.gold) == ("one", "hills", (0,))
    assert (first.kind, second.kind) == ("", "height")


def test_lines_that_share_something_are_one_group(tmp_path: Path) -> None:
    rows = [
        row(0),
        row(1, group="hills"),
        row(2, documents=["hill 0 is  0 miles high."]),  # a document of the first
        row(3, question="how high is hill 2?"),  # a question of the third
        row(4),
        row(5, group="hills"),
        row(6),
    ]
    task = JsonlTask(write(tmp_path, *rows))
    assert [item.id for item in task.items("tuning")] == ["line-1", "line-3", "line-5", "line-11", "line-7"]
    assert [item.group for item in task.items("tuning")] == ["line-1", "hills", "line-1", "hills", "line-1"]
    assert [item.id for item in task.items("evaluation")] == ["line-9", "line-13"]
    assert task.items("tuning", 2) == task.items("tuning")[:2]
    check_apart(task.items("tuning"), task.items("evaluation"))


def test_groups_that_a_later_line_joins(tmp_path: Path) -> None:
    rows = [row(0), row(1), row(2, documents=["Hill 1 is 1 miles high.", "Hill 0 is green."]), row(3)]
    task = JsonlTask(write(tmp_path, *rows))
    assert [item.group for item in task.items("tuning")] == ["line-1"] * 3
    assert [item.id for item in task.items("evaluation")] == ["line-7"]


def test_one_group_evaluates_and_another_file_may_tune(tmp_path: Path) -> None:
    path = write(tmp_path, *(row(n, group="all") for n in range(3)))
    assert len(JsonlTask(path).items("evaluation")) == 3
    with pytest.raises(InputError, match="split: has nothing in it; name another file"):
        JsonlTask(path).items("tuning")
    task = JsonlTask(path, write(tmp_path, row(7), name="tuning.jsonl"))
    assert [len(task.items(split)) for split in task.splits] == [1, 3]
    with pytest.raises(LeakageError, match="questions line-3"):
        JsonlTask(path, write(tmp_path, row(7), row(2), name="tuning.jsonl"))


def test_how_it_is_asked_and_graded(tmp_path: Path) -> None:
    task = JsonlTask(write(tmp_path, row(0)), system="Say it.", grader="squad_f1", right=0.5, answer_limit=8)
    assert (task.system, task.metric, task.answer_limit) == ("Say it.", Metric("squad_f1", right=0.5), 8)
    assert JsonlTask(write(tmp_path, row(0))).metric == Metric("contains_em")
    for wrong in ({"grader": "recal"}, {"form": "marke"}, {"right": 3.0}, {"answer_limit": 0}, {"share": -1.0}):
        with pytest.raises(InputError) as refused:
            JsonlTask(write(tmp_path, row(0)), **wrong)  # type: ignore[arg-type]
        assert refused.value.field in wrong


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "line 3"),
        ("[1]", "line 3"),
        (row(1, documents=[]), "line 3: documents"),
        (row(1, documents="text"), "line 3: documents"),
        (row(1, documents=["text", 7]), "line 3: documents[1]"),
        (row(1, documents=[{"id": "a"}]), "line 3: documents[0]"),
        (row(1, documents=[{"text": "a", "id": ""}]), "line 3: documents[0].id"),
        (row(1, documents=["a", " "]), "line 3: documents[1].text"),
        (row(1, documents=["a", "a"]), "line 3: documents[1].id"),
        (row(1, question=" "), "line 3: question"),
        (row(1, question=None), "line 3: question"),
        (row(1, answers=[]), "line 3: answers"),
        (row(1, answers="yes"), "line 3: answers"),
        (row(1, answers=["yes", ""]), "line 3: answers"),
        (row(1, gold=[2]), "line 3: gold"),
        (row(1, gold=0), "line 3: gold"),
        (row(1, gold=[True]), "line 3: gold"),
        (row(1, id=7), "line 3: id"),
        (row(1, group=""), "line 3: group"),
        (row(1, kind=[]), "line 3: kind"),
        (row(1, id="line-1"), "path"),
    ],
)
def test_errors_name_line_and_field(tmp_path: Path, line: object, field: str) -> None:
    with pytest.raises(InputError) as refused:
        JsonlTask(write(tmp_path, row(0), line))
    assert refused.value.field == field


def test_a_field_that_is_missing_is_told_from_one_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1: answers: is missing; must be a list of at least one text"):
        JsonlTask(write(tmp_path, {"documents": ["a"], "question": "b?"}))
    with pytest.raises(InputError, match=r"line 1: answers: must be a list .* \(got 'str'\)"):
        JsonlTask(write(tmp_path, {"documents": ["a"], "question": "b?", "answers": "c"}))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="path: the file cannot be read"):
        JsonlTask(tmp_path / "nothing.jsonl")
    with pytest.raises(InputError, match="path: the file holds no line"):
        JsonlTask(write(tmp_path, " "))
    (tmp_path / "own.jsonl").write_bytes(b"\xff")
    with pytest.raises(InputError, match="path: the file cannot be read"):
        JsonlTask(tmp_path / "own.jsonl")


@pytest.mark.parametrize(
    ("more", "field", "nearest"),
    [
        ({"anwsers": ["x"]}, "anwsers", "answers"),
        ({"Answer": ["x"]}, "Answer", "answers"),
        ({"questoin": "x"}, "questoin", "question"),
        ({"document": []}, "document", "documents"),
        ({"glod": [0]}, "glod", "gold"),
        ({"grup": "g"}, "grup", "group"),
        ({"KIND": "k"}, "KIND", "kind"),
        ({"ID": "1"}, "ID", "id"),
        ({"documents": ["a", {"text": "b", "ids": "c"}]}, "documents[1]: ids", "id"),
        ({"documents": [{"text": "b", "Txet": "c"}]}, "documents[0]: Txet", "text"),
    ],
)
def test_a_misspelt_field_is_answered_with_the_nearest(
    tmp_path: Path, more: dict[str, Any], field: str, nearest: str
) -> None:
    path = write(tmp_path, row(0), row(1, **more))
    for task in ({"path": path}, {"path": write(tmp_path, row(2), name="other.jsonl"), "tuning": path}):
        with pytest.raises(InputError, match=f"did you mean '{nearest}'.*go into 'meta'") as refused:
            JsonlTask(**task)
        assert refused.value.field == f"line 3: {field}"


def test_fields_that_nobody_reads_are_told_and_those_in_meta_are_not(tmp_path: Path) -> None:
    own = {"anwsers": 1, "topic": [2]}
    rows = [row(0, meta=own, documents=[{"text": "a", "meta": own}]), row(1, topic="hills", difficulty=3)]
    rows.append(row(2, topic="", documents=[{"text": "b", "titel": "c"}, {"text": "d", "titel": "e"}]))
    task = JsonlTask(write(tmp_path, *rows), share=0)
    assert dict(task.skipped) == {"field 'topic'": 2, "field 'difficulty'": 1, "field 'titel' of documents": 2}
    assert task.items("evaluation")[0].answers == ("0 miles", "0")
    assert not JsonlTask(write(tmp_path, row(0)), share=0).skipped
    for wrong, field in (
        (row(0, meta="x"), "meta"),
        (row(0, documents=[{"text": "a", "meta": []}]), "documents[0]: meta"),
    ):
        with pytest.raises(InputError, match="must be an object") as refused:
            JsonlTask(write(tmp_path, wrong))
        assert refused.value.field == f"line 1: {field}"
