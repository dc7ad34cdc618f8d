"""Tasks as they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.biography import BiographyTask
from kvquilt.evaluation.tasks.by_name import TASKS, find_task
from kvquilt.evaluation.tasks.hotpotqa_task import HotpotQATask
from tests.evaluation.tasks.test_hotpotqa import SAMPLES


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = tmp_path / "a=b.json"
    path.write_text(json.dumps(SAMPLES), encoding="utf-8")
    return str(path)


def test_options_are_fields(path: str) -> None:
    assert find_task("biography") == BiographyTask()
    written = find_task("biography:random_seed=3, people=400 ,name_in=first")
    assert written == BiographyTask(3, 400, name_in="first")
    wanted = HotpotQATask(path, documents=2, with_title=False, share=0.5)
    assert find_task(f"hotpotqa:path={path},documents=2,with_title=false,share=0.5") == wanted
    assert all(task.name == name for name, task in TASKS.items())


def test_a_path_needs_no_name(path: str) -> None:
    plain = str(Path(path).rename(Path(path).with_name("plain.json")))
    assert find_task(f"hotpotqa:{plain},documents=2") == HotpotQATask(plain, documents=2)


def test_functions_reach_the_tasks_that_have_use_for_them(path: str) -> None:
    task = find_task(f"hotpotqa:path={path},paragraph=4", length=lambda text: len(text.split()))
    assert task.items("evaluation", 1)[0].documents[0].text == "River 0\nRiver 0 is a river."
    assert find_task("biography", length=len) == BiographyTask()
    with pytest.raises(InputError, match="no such part; did you mean 'length'"):
        find_task("biography", lenght=len)


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("biografy", "task: unknown task; did you mean 'biography'"),
        (7, "task: unknown task; valid: "),
        ("questions.jsonl", "unknown task; a file stands behind its form, as in jsonl:questions.jsonl"),
        ("biography:poeple=7", "task: biography has no option 'poeple'; did you mean 'people'"),
        ("biography:people=many", "task: people must be a number"),
        ("biography:people=1.5", "task: people: must be a whole number"),
        ("biography:people=1", "people: must be an integer from 20"),
        ("biography:people=30,people=40", "task: people is given twice"),
        ("biography:40", "task: an option of biography is written field=value"),
        ("hotpotqa", "task: needs a file: hotpotqa:PATH"),
        ("hotpotqa:a.json,b.json", "task: path is given twice"),
        ("hotpotqa:a.json,length=len", "task: hotpotqa has no option 'length'"),
        ("hotpotqa:a.json,data=1", "task: hotpotqa has no option 'data'"),
        ("hotpotqa:a.json,with_title=maybe", "with_title: must be true or false"),
        ("hotpotqa:nothing.json", "path: must be a file that can be read"),
    ],
)
def test_what_cannot_be_found_is_refused_by_name(written: object, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        find_task(written)
