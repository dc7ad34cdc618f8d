"""Reading HotpotQA's form: three samples of our own, and the public files where EVALUATION_DATA names their folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.hotpotqa import HotpotQA
from kvquilt.evaluation.tasks.hotpotqa_task import HotpotQATask

FILES = {
    "hotpotqa_100.json": "3bc62661a52a98cf22aca3ab99b05522bdebda8e62863a1c89fd427588d19b04",
    "hipporag_hotpotqa_train.json": "6c0e2689d03c94b3bb4d5f94ed806ea4f4eb4f46c12132f8e91df774ad5c5a22",
}


def sample(name: str, answer: str, others: int) -> dict[str, Any]:
    """A river, the town it passes and that town's mayor, among other rivers."""
    river = ["The Amber is a river.", " It passes Drumford.", " It is slow.", " It is green."]
    town = ["Drumford is a town.", " Its mayor is Vera Coldwell."]
    context = [[f"River {n}", [f"River {n} is a river.", f" It is {n} miles long."]] for n in range(others)]
    context.insert(1, ["Amber", river])
    context.append(["Drumford", town])
    question = " Who is mayor of the town that the Amber passes? "
    facts = [["Drumford", 1], ["Amber", 1]]
    return {"_id": name, "question": question, "answer": answer, "supporting_facts": facts, "context": context}


HUB = {"supporting_facts": ("title", "sent_id"), "context": ("title", "sentences")}
SAMPLES = [sample("one", "Vera Coldwell", 8), sample("two", "yes", 2), sample("three", "Vera Coldwell", 8)]


def write(path: Path, rows: object) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.fixture
def task(tmp_path: Path) -> HotpotQA:
    return HotpotQA.read(write(tmp_path / "samples.json", SAMPLES))


def test_samples_become_items_in_the_order_of_the_file(task: HotpotQA) -> None:
    items = task.items()
    assert [item.id for item in items] == [item.group for item in items] == ["one", "two", "three"]
    assert [len(item.documents) for item in items] == [10, 4, 10]
    first = items[0]
    assert first.question == "Who is mayor of the town that the Amber passes?"
    assert first.answers == ("Vera Coldwell",)
    assert first.gold == (1, 9)
    assert (first.task, first.kind) == ("hotpotqa", "")
    assert first.documents[1].text == "Amber\nThe Amber is a river. It passes Drumford. It is slow. It is green."
    assert [item.id for item in task.items(2)] == ["one", "two"]


def test_the_sort_of_a_question_is_the_file_s(tmp_path: Path) -> None:
    rows = [SAMPLES[0] | {"type": "bridge"}, SAMPLES[1] | {"type": "comparison"}]
    items = HotpotQA.read(write(tmp_path / "samples.json", rows)).items()
    assert [item.kind for item in items] == ["bridge", "comparison"]
    with pytest.raises(InputError, match=r"path\[0\]"):
        HotpotQA.read(write(tmp_path / "samples.json", [SAMPLES[0] | {"type": 3}]))


def test_without_titles(tmp_path: Path) -> None:
    rows = [sample("one", "Vera Coldwell", 3)]
    rows[0]["context"][0][1] = ["", " "]
    path = write(tmp_path / "samples.json", rows)
    (item,) = HotpotQA.read(path, with_title=False).items()
    assert item.documents[0].text == "The Amber is a river. It passes Drumford. It is slow. It is green."
    assert len(item.documents) == 4, "a paragraph without a word is left out"
    assert item.gold == (0, 3)
    assert len(HotpotQA.read(path).items()[0].documents) == 5


def test_a_number_of_documents_keeps_the_gold_ones_and_draws_others(task: HotpotQA) -> None:
    for documents in (2, 4, 7):
        for item in task.items(documents=documents):
            assert len(item.documents) == min(documents, 4 if item.id == "two" else 10)
            assert {item.documents[i].text.partition("\n")[0] for i in item.gold} == {"Amber", "Drumford"}
            assert len({document.text for document in item.documents}) == len(item.documents)
    assert task.items(documents=4) == task.items(documents=4)
    assert task.items(documents=4)[2] == HotpotQA(task.samples[2:]).items(documents=4)[0]
    assert task.items(documents=4) != task.items(documents=4, seed=1)


def test_gold_documents_stand_everywhere_and_every_other_is_drawn(task: HotpotQA) -> None:
    items = [task.items(1, documents=4, seed=seed)[0] for seed in range(600)]
    places = Counter(place for item in items for place in item.gold)
    assert sum((places[i] - 300) ** 2 / 300 for i in range(4)) < 16.3  # 0.999 of 3 degrees of freedom
    drawn = Counter(d.text for item in items for i, d in enumerate(item.documents) if i not in item.gold)
    assert len(drawn) == 8
    assert sum((n - 150) ** 2 / 150 for n in drawn.values()) < 24.4  # of 7


def test_long_paragraphs_lose_their_last_sentences_but_no_supporting_one(task: HotpotQA) -> None:
    def amber(limit: int, length: Any = len) -> str:
        (item,) = task.items(1, limit=limit, length=length)
        return item.documents[1].text

    assert amber(66) == "Amber\nThe Amber is a river. It passes Drumford. It is slow. It is green."
    assert amber(65) == "Amber\nThe Amber is a river. It passes Drumford. It is slow."
    assert amber(1) == "Amber\nThe Amber is a river. It passes Drumford."
    assert amber(11, lambda text: len(text.split())) == "Amber\nThe Amber is a river. It passes Drumford. It is slow."
    (item,) = task.items(1, limit=1)
    assert item.documents[0].text == "River 0\nRiver 0 is a river."
    assert item.documents[9].text == "Drumford\nDrumford is a town. Its mayor is Vera Coldwell."
    assert item.gold == (1, 9)


def test_exercises_are_items_without_answers(task: HotpotQA) -> None:
    items, exercises = task.items(2, 4, 3, limit=40), task.exercises(2, 4, 3, limit=40)
    assert [e.documents for e in exercises] == [item.documents for item in items]
    assert [e.questions for e in exercises] == [(item.question,) for item in items]


def test_samples_that_share_a_paragraph_with_an_evaluation_are_left_out(task: HotpotQA, tmp_path: Path) -> None:
    other = sample("four", "Vera Coldwell", 0)
    other["context"] = [["Amber", ["Another river.", " Another town."]], ["Drumford", ["One more.", " And more."]]]
    train = HotpotQA.read(write(tmp_path / "train.json", [*SAMPLES, other]))
    assert [s.id for s in train.apart_from(task).samples] == ["four"]
    assert len(task.apart_from(HotpotQA(train.samples[3:])).samples) == 3


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda row: row.pop("answer"), "must be a list of HotpotQA samples"),
        (lambda row: row.update(question=7), "question: must be a string"),
        (lambda row: row.update(context=[["Amber"]]), "must be a list of HotpotQA samples"),
        (lambda row: row["context"].pop(), "every supporting title"),
        (lambda row: row["supporting_facts"].append(["Amber", 4]), "every supporting sentence"),
    ],
)
def test_a_sample_of_another_form_is_named_by_its_index(tmp_path: Path, change: Any, rule: str) -> None:
    rows = [sample("one", "yes", 2), sample("two", "no", 2)]
    change(rows[1])
    with pytest.raises(InputError, match=rule) as refused:
        HotpotQA.read(write(tmp_path / "samples.json", rows))
    assert refused.value.field.partition(":")[0] == "path[1]"


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "samples.json", SAMPLES)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(HotpotQA.read(path, sha256=digest).samples) == 3
    with pytest.raises(InputError, match="must have the SHA-256 digest"):
        HotpotQA.read(path, sha256="0" * 64)
    with pytest.raises(InputError, match="must be a file that can be read"):
        HotpotQA.read(tmp_path / "nothing.json")
    for rows in ({}, [], "text"):
        with pytest.raises(InputError, match="must be a list of HotpotQA samples"):
            HotpotQA.read(write(path, rows))
    path.write_bytes(b"\xff{")
    with pytest.raises(InputError, match="must be a list of HotpotQA samples"):
        HotpotQA.read(path)


@pytest.mark.parametrize(
    "wrong", [{"count": 0}, {"documents": 0}, {"documents": 1}, {"limit": 0}, {"count": True}, {"documents": 2.0}]
)
def test_sizes_that_cannot_be_made_are_refused_by_name(task: HotpotQA, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        task.items(**wrong)
    assert refused.value.field in wrong


def test_the_form_of_the_hub_is_the_same(task: HotpotQA, tmp_path: Path) -> None:
    rows = []
    for row in SAMPLES:
        facts, context = (dict(zip(names, zip(*row[field], strict=True), strict=True)) for field, names in HUB.items())
        rows.append(
            {
                "id": row["_id"],
                "question": row["question"],
                "answer": row["answer"],
                "context": context,
                "supporting_facts": facts,
            }
        )
    assert HotpotQA.read(write(tmp_path / "hub.json", rows)) == task
    rows[1]["supporting_facts"]["title"] = ["Amber"]
    with pytest.raises(InputError, match="must be a list of HotpotQA samples"):
        HotpotQA.read(write(tmp_path / "hub.json", rows))


def test_one_file_evaluates_and_another_tunes(tmp_path: Path) -> None:
    other = sample("four", "Vera Coldwell", 0)
    other["context"] = [["Amber", ["Another river.", " Another town."]], ["Drumford", ["One more.", " And more."]]]
    path = write(tmp_path / "dev.json", SAMPLES)
    task = HotpotQATask(path, write(tmp_path / "train.json", [SAMPLES[0], other]), documents=3)
    assert [item.id for item in task.items("tuning")] == ["four"], "the other shares paragraphs with evaluation"
    assert task.skipped == {"tuning samples that share a paragraph with evaluation": 1}
    assert task.items("evaluation") == HotpotQA.read(path).items(documents=3)
    assert task.items("evaluation", 2, seed=1) == HotpotQA.read(path).items(2, 3, 1)
    alone = HotpotQATask(path, with_title=False, paragraph=20)
    assert alone.items("evaluation") == HotpotQA.read(path, with_title=False).items(limit=20)
    with pytest.raises(InputError, match="split: has nothing in it"):
        alone.items("tuning")
    with pytest.raises(InputError, match="did you mean 'evaluation'"):
        alone.items("evaluations")
    halves = HotpotQATask(write(tmp_path / "halves.json", [other, SAMPLES[0]]), share=0.5)
    assert [[item.id for item in halves.items(split)] for split in halves.splits] == [["four"], ["one"]]


@pytest.mark.parametrize("wrong", [{"documents": -1}, {"paragraph": -1}, {"share": 1.5}, {"sha256": "0" * 64}])
def test_settings_that_cannot_be_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        HotpotQATask(write(tmp_path / "samples.json", SAMPLES), **wrong)


def test_the_public_files() -> None:
    folder = os.environ.get("EVALUATION_DATA")
    if folder is None:
        pytest.skip("EVALUATION_DATA does not name a folder with HotpotQA files")
    evaluation, train = (HotpotQA.read(Path(folder) / name, sha256=digest) for name, digest in FILES.items())
    for task in (evaluation, train):
        items = task.items()
        assert len(items) == 100
        assert all(len(item.gold) == 2 for item in items)
        assert Counter(len(item.documents) for item in items) == {10: 99, 4: 1}
    assert len(train.apart_from(evaluation).samples) == 98
    assert {s.id for s in train.samples}.isdisjoint(s.id for s in evaluation.samples)
