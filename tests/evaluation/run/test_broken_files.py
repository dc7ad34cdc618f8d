"""Files of tasks with any part missing or of another form: an error that names place and field, or items that run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.by_name import find_task

_ASKED = {"id": "1", "question": "Who?", "answer": "Ann"}
FILES: dict[str, Any] = {
    "jsonl": {
        "documents": ["One text.", {"id": "b", "text": "Two texts."}], "question": "Who?", "answers": ["Ann"],
        "gold": [0], "group": "g", "kind": "k", "id": "1",
    },
    "hotpotqa": [
        {**_ASKED, "type": "bridge", "supporting_facts": [["T", 0]],
         "context": [["T", ["One.", " Two."]], ["U", ["Three."]]]},
    ],
    "musique": [
        {**_ASKED, "answer_aliases": ["Anna"], "answerable": True, "paragraphs": [
            {"title": "T", "paragraph_text": "One.", "is_supporting": True},
            {"title": "U", "paragraph_text": "Two.", "is_supporting": False}]},
    ],
    "squad": {"data": [
        {"title": "T", "paragraphs": [
            {"context": "One text.", "qas": [{**_ASKED, "answers": [{"text": "One", "answer_start": 0}]}]}]},
    ]},
    "dialogue": [
        {"sample_id": "d", "qa": [{**_ASKED, "evidence": ["D1:1"], "category": 1}], "conversation": {
            "session_1": [{"dia_id": "D1:1", "speaker": "Ann", "text": "Hello."}], "session_1_date_time": "noon"}},
    ],
}  # fmt: skip
MISSING = object()
STRANGE = [
    MISSING, None, True, -1, 1.5, float("nan"), float("inf"), 10**30, "", " ", "9" * 5000, "\ud800", "\x00", [], [None],
    [[]], {}, {"a": 1}, [0, 0], [-1], [["T", -1]], [["T", float("inf")]], [{"text": "\ud800"}], ["d", "d"],
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*at, key)
        yield from places(each, (*at, key))


def changed(value: Any, at: tuple[Any, ...], new: object) -> Any:
    copy = json.loads(json.dumps(value))
    within = copy
    for key in at[:-1]:
        within = within[key]
    if new is MISSING:
        del within[at[-1]]
    else:
        within[at[-1]] = new
    return copy


@pytest.mark.parametrize("task", FILES)
def test_any_part_of_another_form_is_refused_or_leaves_items_that_can_run(tmp_path: Path, task: str) -> None:
    path, refused, made = tmp_path / f"file.{'jsonl' if task == 'jsonl' else 'json'}", 0, 0
    more = [",form=evidence"] if task == "dialogue" else [] if task == "jsonl" else [",documents=3"]
    for at in places(FILES[task]):
        for new in STRANGE:
            path.write_text(json.dumps(changed(FILES[task], at, new)), encoding="utf-8")
            for options in ["", *more]:
                try:
                    items = find_task(f"{task}:{path},share=0{options}").items("evaluation")
                except InputError as error:
                    refused += 1
                    str(error).encode()
                    continue
                made += 1
                for item in items:
                    for text in (item.id, item.question, item.group, item.kind, *item.answers):
                        text.encode()
                    assert len(set(item.gold)) == len(item.gold)
    assert refused > 100
    assert made > 10


@pytest.mark.parametrize(
    ("task", "at", "new", "field", "says"),
    [
        ("hotpotqa", (0, "question"), MISSING, "path[0]", "no question"),
        ("hotpotqa", (0, "answer"), 7, "path[0]: answer", "int"),
        ("musique", (0, "paragraphs", 1, "title"), MISSING, "path[0]", "no title"),
        ("musique", (0, "question"), None, "path[0]: question", "NoneType"),
        ("squad", ("data", 0, "paragraphs", 0, "qas", 0, "id"), MISSING, "path.data[0]", "no id"),
        ("squad", ("data", 0, "title"), [], "path.data[0]: title", "list"),
        ("dialogue", (0, "conversation", "session_1", 0, "speaker"), MISSING, "path[0]", "no speaker"),
        ("dialogue", (0, "qa", 0, "evidence"), [1], "path[0]: evidence", "int"),
    ],
)
def test_errors_name_row_and_field(
    tmp_path: Path, task: str, at: tuple[Any, ...], new: object, field: str, says: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(changed(FILES[task], at, new)), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        find_task(f"{task}:{path},share=0")
    assert (refused.value.field, refused.value.got) == (field, says)


@pytest.mark.parametrize("task", ["hotpotqa", "musique", "dialogue"])
def test_a_line_that_is_no_json_is_named(tmp_path: Path, task: str) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps(FILES[task][0]) + "\n\n" + "[" * 100_000, encoding="utf-8")
    with pytest.raises(InputError) as refused:
        find_task(f"{task}:{path}")
    assert refused.value.field == "path: line 3"


@pytest.mark.parametrize("task", FILES)
def test_files_that_nobody_can_have_or_read(tmp_path: Path, task: str) -> None:
    path = tmp_path / f"file.{'jsonl' if task == 'jsonl' else 'json'}"
    good = json.dumps(FILES[task])
    for name in ("a\0b", str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(InputError, match="path"):
            find_task(f"{task}:{name}")
    for raw in (b"", b"\n", b"\xff\xfe", b"\x00", b"[" * 100_000, b'{"a":' * 100_000, b"null", b"[]", b"1" * 5000):
        path.write_bytes(raw)
        with pytest.raises(InputError):
            find_task(f"{task}:{path}")
    path.write_bytes(b"\xef\xbb\xbf" + good.encode())
    assert len(find_task(f"{task}:{path},share=0").items("evaluation")) == 1
