"""What every task must do; it is enough that `TASKS` names it. One that reads a file has an example of its form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.by_name import TASKS, find_task
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.leakage import check_apart, check_documents_apart, digests, manifest
from kvquilt.evaluation.tasks.task import Task
from tests.evaluation.tasks import test_dialogue, test_hotpotqa, test_jsonl, test_musique, test_squad

FORMS: dict[str, Callable[[], Any]] = {  # name -> what a file of its form holds
    "hotpotqa": lambda: [
        test_hotpotqa.sample(f"{n}", f"Vera {n}well", 0)
        | {
            "question": f"Who is mayor of {n}ford?",
            "context": [
                [f"{n}", [f"River {n}.", " It runs."]],
                [f"{n}ford", ["A town.", f" Its mayor is Vera {n}well."]],
            ]
            + [[f"Hill {k}", [f"Hill {k} of {n} is high."]] for k in range(5)],
            "supporting_facts": [[f"{n}", 0], [f"{n}ford", 1]],
        }
        for n in range(6)
    ],
    "musique": lambda: [test_musique.sample(name) for name in ("Amber", "Birch", "Coal", "Dale")],
    "squad": lambda: {"data": [test_squad.article(title) for title in ("Avia", "Bora", "Coria", "Doria")]},
    "dialogue": lambda: [test_dialogue.dialogue(f"talk{n}") for n in range(5)],
    "jsonl": lambda: [test_jsonl.row(n, gold=[0]) for n in range(4)],
}
VARIANTS = {  # beside what a name alone gives
    "biography": ["name_in=first,documents=2,people=200"],
    "niah": [f"kind={kind},documents=3,tokens=100" for kind in ("multikey", "multivalue", "multiquery", "chain")],
    "api_docs": ["source=invented", "source=invented,company=twins,documents=3"],
    "hotpotqa": ["share=0.5,documents=3", "share=0.5,with_title=false"],
    "musique": ["documents=3"],
    "squad": ["company=others,documents=2"],
    "dialogue": ["form=evidence,documents=2", "unit=turn"],
}
WRITTEN = [(name, options) for name in TASKS for options in ("", *VARIANTS.get(name, ()))]
every = pytest.mark.parametrize(("name", "options"), WRITTEN)
SMALL = 12


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str, str], Task]:
    def make(name: str, options: str) -> Task:
        given = [options] if options else []
        if "path" in {f.name for f in dataclasses.fields(TASKS[name])}:  # type: ignore[arg-type]
            rows, path = FORMS[name](), tmp_path / ("data.jsonl" if name == "jsonl" else "data.json")
            path.write_text("\n".join(map(json.dumps, rows)) if name == "jsonl" else json.dumps(rows), encoding="utf-8")
            given.insert(0, str(path))
            if name == "hotpotqa" and "share" not in options:  # its splits are files
                given.append("share=0.5")
        return find_task(f"{name}:{','.join(given)}")

    return make


def drawn(task: Task, seed: int = 0) -> dict[str, list[Item]]:
    return {split: task.items(split, SMALL, seed=seed) for split in task.splits}


@every
def test_a_task_says_what_it_is(make: Callable[[str, str], Task], name: str, options: str) -> None:
    task = make(name, options)
    assert dataclasses.is_dataclass(task)
    assert task.name == name
    assert task.system.strip()
    assert isinstance(task.metric, Metric)
    assert task.answer_limit >= 1
    assert set(task.splits) >= {"tuning", "evaluation"}
    assert all(reason and count >= 0 for reason, count in task.skipped.items())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(task, dataclasses.fields(task)[0].name, 3)


@every
def test_the_same_items_for_a_seed_whoever_asks(make: Callable[[str, str], Task], name: str, options: str) -> None:
    task, again = make(name, options), make(name, options)
    assert task == again
    for split, items in drawn(task).items():
        assert items
        assert len(items) <= SMALL
        assert items == again.items(split, SMALL)
        assert items[:3] == task.items(split, 3), "a smaller count is a head of a larger"


@every
def test_items_are_whole(make: Callable[[str, str], Task], name: str, options: str) -> None:
    task = make(name, options)
    for items in drawn(task).values():
        assert len({item.id for item in items}) == len(items)
        for item in items:
            assert item.task == name
            assert item.group
            assert list(item.gold) == sorted(set(item.gold))
            assert all(0 <= n < len(item.documents) for n in item.gold)
            assert item.gold or "retrieved" in str(task), "only a retriever may miss"


@every
def test_right_answers_are_right_and_others_are_not(make: Callable[[str, str], Task], name: str, options: str) -> None:
    task = make(name, options)
    for item in drawn(task)["evaluation"]:
        assert all(task.metric.is_right(answer, item.answers) for answer in item.answers)
        assert not task.metric.is_right("", item.answers)
        assert not task.metric.is_right("nothing of the kind", item.answers)


@every
def test_answers_stand_in_the_gold_documents(make: Callable[[str, str], Task], name: str, options: str) -> None:
    task = make(name, options)
    if not task.extractive:
        pytest.skip("its answers may be worded otherwise")
    for items in drawn(task).values():
        for item in items:
            gold = "\n".join(item.documents[n].text for n in item.gold)
            parts = item.answers[0].split(", ") if task.metric.grader == "recall" else item.answers[:1]
            assert all(part in gold for part in parts)


@every
def test_splits_share_nothing(make: Callable[[str, str], Task], name: str, options: str) -> None:
    made = drawn(make(name, options))
    for split, items in made.items():
        if split != "evaluation":
            check_apart(items, made["evaluation"])
            check_documents_apart(split, [d for i in items for d in i.documents], manifest(made["evaluation"]))
    own = {digest for i in made["evaluation"] for d in i.documents for digest in digests(d.text)}
    assert manifest(made["evaluation"]) == own


@every
def test_what_no_task_has_is_refused(make: Callable[[str, str], Task], name: str, options: str) -> None:
    task = make(name, options)
    with pytest.raises(InputError, match="split: must be one of"):
        task.items("dev", 1)
    for count in (0, -1, True):
        with pytest.raises(InputError, match="count: must be an integer from 1"):
            task.items("tuning", count)
