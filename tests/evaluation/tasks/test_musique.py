"""Reading MuSiQue's form: samples of our own, and the public file where EVALUATION_DATA names its folder."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.leakage import check_apart
from kvquilt.evaluation.tasks.musique import MusiqueTask

SHA256 = "bca674746844637f5c68408a96b67bc0542d98e7c53715f3acafe144bd5e4ff4"


def sample(name: str, others: int = 3) -> dict[str, Any]:
    """A river of the sample's own and the mayor of its town, among hills, two of them with one title."""
    texts = [("Hill", f"Hill {n} of {name} is {n} miles high.", False) for n in range(others)]
    texts.insert(1, (f"River {name}", f"It passes {name}ford.", True))
    texts.append((f"{name}ford", f"Its mayor is Vera {name}well.", True))
    paragraphs = [
        {"idx": n, "title": title, "paragraph_text": text, "is_supporting": supporting}
        for n, (title, text, supporting) in enumerate(texts)
    ]
    return {
        "id": name,
        "question": f" Who is mayor of the town on River {name}? ",
        "answer": f"Vera {name}well",
        "answer_aliases": [f"V. {name}well", f"Vera {name}well", " "],
        "answerable": True,
        "paragraphs": paragraphs,
    }


SAMPLES = [sample(name) for name in ("Amber", "Birch", "Coal", "Dale")]


def write(folder: Path, rows: object, name: str = "samples.json") -> Path:
    path = folder / name
    lines = isinstance(rows, list) and path.suffix == ".jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows), encoding="utf-8")  # type: ignore[call-overload]
    return path


def test_samples_become_items(tmp_path: Path) -> None:
    task = MusiqueTask(write(tmp_path, SAMPLES))
    assert [[item.id for item in task.items(split)] for split in task.splits] == [["Amber", "Birch"], ["Coal", "Dale"]]
    (item,) = task.items("tuning", 1)
    assert item.question == "Who is mayor of the town on River Amber?"
    assert item.answers == ("Vera Amberwell", "V. Amberwell")
    assert item.gold == (1, 4)
    assert (item.group, item.task, item.kind) == ("Amber", "musique", "2 hops")
    assert [d.text for d in item.documents[:2]] == [
        "Hill\nHill 0 of Amber is 0 miles high.",
        "River Amber\nIt passes Amberford.",
    ]
    assert task.skipped == {"paragraphs of tuning that stand in evaluation": 0}


def test_lines_and_another_file_for_tuning(tmp_path: Path) -> None:
    task = MusiqueTask(write(tmp_path, SAMPLES[:3], "dev.jsonl"), write(tmp_path, SAMPLES[3:], "train.jsonl"))
    assert [[item.id for item in task.items(split)] for split in task.splits] == [["Dale"], ["Amber", "Birch", "Coal"]]


def test_a_number_of_documents_keeps_the_gold_ones(tmp_path: Path) -> None:
    path = write(tmp_path, [sample("Amber", 12)])
    items = [MusiqueTask(path, share=0.0, documents=4).items("evaluation", seed=seed)[0] for seed in range(300)]
    for item in items:
        assert len(item.documents) == 4
        assert {item.documents[i].text.partition("\n")[0] for i in item.gold} == {"River Amber", "Amberford"}
    places = Counter(place for item in items for place in item.gold)
    assert sum((places[i] - 150) ** 2 / 150 for i in range(4)) < 16.3  # 0.999 of 3 degrees of freedom
    assert len({d.text for item in items for d in item.documents}) == 14
    with pytest.raises(InputError, match="documents: must be at least the 2 gold ones"):
        MusiqueTask(path, share=0.0, documents=1).items("evaluation")


def test_without_titles_empty_paragraphs_go(tmp_path: Path) -> None:
    row = sample("Amber")
    row["paragraphs"][0]["paragraph_text"] = " "
    path = write(tmp_path, [row])
    (item,) = MusiqueTask(path, share=0.0, with_title=False).items("evaluation")
    assert item.documents[0].text == "It passes Amberford."
    assert item.gold == (0, 3)
    assert len(MusiqueTask(path, share=0.0).items("evaluation")[0].documents) == 5


def test_what_evaluates_does_not_tune(tmp_path: Path) -> None:
    rows = [sample(name) for name in ("Amber", "Birch", "Coal", "Dale")]
    rows[2]["paragraphs"][0]["paragraph_text"] = "hill 0 of AMBER is 0 miles high."
    rows[3]["paragraphs"][0]["paragraph_text"] = "It passes Birchford."
    task = MusiqueTask(write(tmp_path, rows))
    assert [(item.id, len(item.documents)) for item in task.items("tuning")] == [("Amber", 4)]
    assert [len(item.documents) for item in task.items("evaluation")] == [5, 5]
    assert task.skipped == {
        "paragraphs of tuning that stand in evaluation": 1,
        "tuning samples whose gold evaluates": 1,
    }
    check_apart(task.items("tuning"), task.items("evaluation"))


def test_samples_without_an_answer_are_counted(tmp_path: Path) -> None:
    rows = [sample("Amber"), sample("Birch") | {"answerable": False}]
    task = MusiqueTask(write(tmp_path, rows), share=0.0)
    assert [item.id for item in task.items("evaluation")] == ["Amber"]
    assert task.skipped["unanswerable"] == 1


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda row: row.pop("answer"), "must be a list of MuSiQue samples"),
        (lambda row: row.update(question=7), "question: must be a string"),
        (lambda row: row["paragraphs"][0].pop("title"), "must be a list of MuSiQue samples"),
        (lambda row: row["paragraphs"][1].update(paragraph_text=""), "must have supporting paragraphs"),
        (lambda row: [p.update(is_supporting=False) for p in row["paragraphs"]], "must have supporting paragraphs"),
    ],
)
def test_a_sample_of_another_form_is_named_by_its_index(tmp_path: Path, change: Any, rule: str) -> None:
    rows = [sample("Amber"), sample("Birch")]
    change(rows[1])
    with pytest.raises(InputError, match=rule) as refused:
        MusiqueTask(write(tmp_path, rows))
    assert refused.value.field.partition(":")[0] == "path[1]"


def test_what_is_no_list_of_samples_is_refused(tmp_path: Path) -> None:
    for rows in ([], {}, ["text"]):
        with pytest.raises(InputError, match="must be a list of MuSiQue samples"):
            MusiqueTask(write(tmp_path, rows))


def test_the_public_file() -> None:
    folder = os.environ.get("EVALUATION_DATA")
    if folder is None:
        pytest.skip("EVALUATION_DATA does not name a folder with MuSiQue's file")
    task = MusiqueTask(Path(folder) / "hipporag_musique_train.json", sha256=SHA256)
    tuning, evaluation = (task.items(split) for split in task.splits)
    assert (len(tuning), len(evaluation)) == (49, 50)
    assert {len(item.documents) for item in evaluation} == {20}
    assert all(any(a in i.documents[g].text for a in i.answers for g in i.gold) for i in tuning + evaluation)
    check_apart(tuning, evaluation)
