"""Reading SQuAD's form: articles of our own, and the public file where EVALUATION_DATA names its folder."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError, LeakageError
from kvquilt.evaluation.tasks.leakage import check_apart
from kvquilt.evaluation.tasks.squad import SquadTask

SHA256 = "e4c57d1c9143aaa1c5d265ba5987a65f4e69528d2a98f29d6e75019b10344f29"


def article(title: str, paragraphs: int = 3, questions: int = 2) -> dict[str, Any]:
    """Hills of a country, so high."""

    def asked(n: int, q: int) -> dict[str, Any]:
        high = f"{n}{q} miles"
        answers = [{"text": high, "answer_start": 0}, {"text": f"{high} ", "answer_start": 0}]
        return {"id": f"{title}-{n}-{q}", "question": f" How high is hill {n}.{q} of {title}?", "answers": answers}

    def context(n: int) -> str:
        return " ".join(f"Hill {n}.{q} of {title} is {n}{q} miles high." for q in range(questions))

    made = [{"context": context(n), "qas": [asked(n, q) for q in range(questions)]} for n in range(paragraphs)]
    return {"title": title, "paragraphs": made}


ARTICLES = [article("Avia"), article("Bora"), article("Coria", 8), article("Doria", 2, 3)]


def write(folder: Path, articles: object, name: str = "squad.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(articles), encoding="utf-8")
    return path


@pytest.fixture
def task(tmp_path: Path) -> SquadTask:
    return SquadTask(write(tmp_path, {"version": "1.1", "data": ARTICLES}))


def test_articles_are_split_and_take_turns(task: SquadTask) -> None:
    assert [item.id for item in task.items("tuning", 3)] == ["Avia-0-0", "Bora-0-0", "Avia-0-1"]
    assert {item.group for item in task.items("tuning")} == {"Avia", "Bora"}
    evaluation = task.items("evaluation")
    assert Counter(item.group for item in evaluation) == {"Coria": 16, "Doria": 6}
    assert task.items("evaluation", 5) == evaluation[:5]
    assert len({item.id for item in evaluation}) == 22
    check_apart(task.items("tuning"), evaluation)


def test_the_gold_paragraph_stands_among_others_of_its_article(task: SquadTask) -> None:
    for item in task.items("tuning") + task.items("evaluation"):
        assert len(item.documents) == {"Coria": 5, "Doria": 2}.get(item.group, 3)
        assert all(f"of {item.group} " in document.text for document in item.documents)
        assert len({document.text for document in item.documents}) == len(item.documents)
        (gold,) = item.gold
        assert item.answers[0] in item.documents[gold].text
        assert len(item.answers) == 1, "the same answer is accepted once"
        assert f"hill {item.id.split('-')[1]}." in item.question
    assert task.items("evaluation") != task.items("evaluation", seed=1)


def test_the_gold_paragraph_stands_everywhere_and_every_other_is_drawn(tmp_path: Path) -> None:
    task = SquadTask(write(tmp_path, {"data": [article("Coria", 8)]}), share=0.0, documents=4)
    items = [task.items("evaluation", 1, seed=seed)[0] for seed in range(400)]
    places = Counter(item.gold[0] for item in items)
    assert sum((places[i] - 100) ** 2 / 100 for i in range(4)) < 16.3  # 0.999 of 3 degrees of freedom
    drawn = Counter(d.id for item in items for n, d in enumerate(item.documents) if n != item.gold[0])
    assert len(drawn) == 7
    assert sum((n - 1200 / 7) ** 2 / (1200 / 7) for n in drawn.values()) < 22.5  # of 6


def test_company_of_other_articles(tmp_path: Path) -> None:
    task = SquadTask(write(tmp_path, {"data": ARTICLES}), documents=3, company="others")
    for item in task.items("evaluation"):
        assert len(item.documents) == 3
        assert [f"of {item.group} " in d.text for d in item.documents] == [n == item.gold[0] for n in range(3)]
    check_apart(task.items("tuning"), task.items("evaluation"))


def test_another_file_tunes_if_it_shares_no_paragraph(tmp_path: Path) -> None:
    path = write(tmp_path, {"data": ARTICLES[1:]})
    task = SquadTask(path, write(tmp_path, {"data": ARTICLES[:1]}, "tuning.json"))
    assert [len(task.items(split)) for split in task.splits] == [6, 28]
    with pytest.raises(LeakageError, match="tuning: must be apart, but share documents squad-1-0, squad-1-1"):
        SquadTask(path, write(tmp_path, {"data": ARTICLES[:2]}, "tuning.json"))


def test_questions_without_an_answer_are_counted(tmp_path: Path) -> None:
    articles = [article("Avia"), article("Bora", 1, 1)]
    articles[1]["paragraphs"][0]["qas"][0].update(answers=[], is_impossible=True)
    task = SquadTask(write(tmp_path, {"data": articles}), share=0.0)
    assert {item.group for item in task.items("evaluation")} == {"Avia"}
    assert task.skipped == {"unanswerable": 1}


def hub(articles: list[dict[str, Any]], titled: bool = True) -> list[dict[str, Any]]:
    return [
        ({"title": a["title"]} if titled else {})
        | {"id": qa["id"], "context": p["context"], "question": qa["question"]}
        | {"answers": {"text": [each["text"] for each in qa["answers"]], "answer_start": [0, 0]}}
        for a in articles
        for p in a["paragraphs"]
        for qa in p["qas"]
    ]


def test_rows_of_the_hub_are_the_same(task: SquadTask, tmp_path: Path) -> None:
    rows = SquadTask(write(tmp_path, hub(ARTICLES), "rows.json"))
    for split in task.splits:
        assert rows.items(split) == task.items(split)
    untitled = SquadTask(write(tmp_path, hub(ARTICLES, titled=False), "rows.json"), company="others")
    items = untitled.items("evaluation")
    assert {item.group for item in items} == {f"paragraph-{n}" for n in range(8, 16)}
    assert {len(item.documents) for item in items} == {5}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda data: data[1].pop("title"), "path.data[1]"),
        (lambda data: data[0]["paragraphs"][0].pop("context"), "path.data[0]"),
        (lambda data: data[1]["paragraphs"][0]["qas"][0].update(question=None), "path.data[1]: question"),
        (lambda data: data[1]["paragraphs"][0]["qas"][0].update(answers=7), "path.data[1]"),
        (lambda data: data[1].update(title="Avia"), "path"),
        (lambda data: data.clear(), "path"),
    ],
)
def test_an_article_of_another_form_is_named_by_its_index(tmp_path: Path, change: Any, field: str) -> None:
    articles = [article("Avia"), article("Bora")]
    change(articles)
    with pytest.raises(InputError) as refused:
        SquadTask(write(tmp_path, {"data": articles}))
    assert refused.value.field == field


def test_other_files_and_settings_are_refused(tmp_path: Path) -> None:
    for rows in ({}, [], 7, {"data": 7}, [{"question": "?"}], ["text"]):
        with pytest.raises(InputError, match="path: must be SQuAD's"):
            SquadTask(write(tmp_path, rows))
    path = write(tmp_path, {"data": ARTICLES})
    with pytest.raises(InputError, match="company: must be one of article, others"):
        SquadTask(path, company="other")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="documents: must be an integer from 1"):
        SquadTask(path, documents=0)


def test_the_public_file() -> None:
    folder = os.environ.get("EVALUATION_DATA")
    if folder is None:
        pytest.skip("EVALUATION_DATA does not name a folder with XQuAD's file")
    task = SquadTask(Path(folder) / "xquad.en.json", sha256=SHA256)
    tuning, evaluation = (task.items(split) for split in task.splits)
    assert (len(tuning), len(evaluation)) == (632, 558)
    assert [len({item.group for item in items}) for items in (tuning, evaluation)] == [24, 24]
    assert {len(item.documents) for item in tuning + evaluation} == {5}
    assert all(item.answers[0] in item.documents[item.gold[0]].text for item in tuning + evaluation)
    assert task.skipped == {}
    check_apart(tuning, evaluation)
