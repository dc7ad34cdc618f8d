"""What is trained on: splits that leak nothing, sets that are drawn, questions that are made once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError, LeakageError
from kvquilt.evaluation.tasks.leakage import known
from kvquilt.passages import read_passages
from kvquilt.prompt import Document
from kvquilt.template import PromptTemplate
from kvquilt.training import asking
from kvquilt.training.asking import Asker, is_about, one_question, stand_in
from kvquilt.training.data import Data, Sets, asked_data, divided, drawn, split_exercises
from kvquilt.training.exercise import Exercise
from kvquilt.training.jsonl import read_exercises
from kvquilt.training.sources import Reading, Source
from tests.models import tiny


def passages(files: int, each: int = 2) -> list[list[Document]]:
    return [[Document(f"Text {n} part {k}.", id=f"{n}.txt#{k}") for k in range(each)] for n in range(files)]


def files_of(documents: Any) -> set[str]:
    return {d.id.rpartition("#")[0] for d in documents}


def plain_asker(count: int = 4, file: Path | None = None, seed: int = 0) -> Asker:
    model = tiny()
    return Asker(model, PromptTemplate(model.tokenizer, "Be brief."), count, seed, file)


class Fixed:
    """Stands for an asker whose model asks three things about every document."""

    def questions(self, documents: Any, progress: Any = None) -> list[list[str]]:
        return [[f"{what} is in {d.id}?" for what in ("Who", "What", "Where")] for d in documents]


def test_no_file_is_in_both_parts_and_a_share_is_held_out() -> None:
    train, held = divided(passages(20), Sets(held_out=0.2))
    assert not files_of(train) & files_of(held)
    assert len(held) == 8
    assert len(train) + len(held) == 40
    assert divided(passages(20), Sets(held_out=0.2)) == (train, held)
    assert divided(passages(20), Sets(held_out=0.2, seed=1)) != (train, held)


def test_a_large_file_is_not_held_out_for_a_small_share() -> None:
    train, held = divided([*passages(1, 50), [Document("small", id="s.txt#1")]], Sets(held_out=0.1))
    assert files_of(held) == {"s.txt"}
    assert len(train) == 50


def test_nothing_is_held_out_where_nothing_is_asked_to_be() -> None:
    train, held = divided(passages(1, 5), Sets(held_out=0.0))
    assert (len(train), held) == (5, [])


@pytest.mark.parametrize(("files", "said"), [(1, "at least two files"), (2, "a set of 4 needs")])
def test_too_few_documents_are_refused(files: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        divided(passages(files), Sets())


def test_every_document_comes_once_before_any_comes_twice() -> None:
    pool = [d for each in passages(5) for d in each]
    sets = drawn(pool, (), 10, Sets(documents=(3, 4)), "train")
    assert [len(each) for each in sets] == [3, 4] * 5
    assert all(len({d.id for d in each}) == len(each) for each in sets)
    counts = Counter(d.id for each in sets for d in each)
    assert set(counts) == {d.id for d in pool}
    assert max(counts.values()) - min(counts.values()) <= 1
    assert sets == drawn(pool, (), 10, Sets(documents=(3, 4)), "train")
    assert sets != drawn(pool, (), 10, Sets(documents=(3, 4), seed=1), "train")


def test_held_out_sets_ask_about_held_out_documents_only() -> None:
    train, held = divided(passages(10, 1), Sets(held_out=0.1))
    made = asked_data(train, held, Sets(validation=3), Fixed(), lambda exercise: None)
    assert len(made.exercises) == 9
    assert len(made.held_out) == 3
    for exercise in made.held_out:
        assert len(exercise.documents) == 4
        assert held[0] in exercise.documents
        assert all(held[0].id in question for question in exercise.questions)
    assert all(held[0] not in exercise.documents for exercise in made.exercises)


def test_questions_of_a_set_are_different_and_spread_over_its_documents() -> None:
    train, held = divided(passages(10, 1), Sets(held_out=0.0))
    made = asked_data(train, held, Sets(questions=4), Fixed(), lambda exercise: None)
    for exercise in made.exercises:
        assert len(set(exercise.questions)) == 4
        assert {d.id for d in exercise.documents} == {q.split(" in ")[1][:-1] for q in exercise.questions}
    again = asked_data(train, held, Sets(questions=4), Fixed(), lambda exercise: None)
    assert made == again


def test_what_does_not_fit_is_refused_before_a_question_is_made() -> None:
    def refuse(exercise: Exercise) -> None:
        raise InputError("a set", "too long")

    class Unasked:
        def questions(self, documents: Any, progress: Any = None) -> list[list[str]]:
            raise AssertionError("asked")

    with pytest.raises(InputError, match="too long"):
        asked_data([d for each in passages(4) for d in each], [], Sets(), Unasked(), refuse)


def test_nothing_is_asked_about_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text(f"The cat {name} likes a box of its own.")
    monkeypatch.setattr(Asker, "questions", None)
    text = (tmp_path / "c.txt").read_text()
    made = replace(reading(tmp_path, Sets((2,))), refused=known([Document(text)]))
    with pytest.raises(LeakageError, match=r"c\.txt"):
        made.read(Source.parse(str(tmp_path)))


def test_the_model_asks_once_and_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document(f"The cat {n} likes box {n}.", id=str(n)) for n in range(3)]
    said = ["Which cat?", "no question", "Which cat?", "Why? Because.", "none", "What is the answer?", "none", "none"]
    texts = iter([*said, "Who?"])
    real = asking.one_question
    monkeypatch.setattr(asking, "one_question", lambda text: real(next(texts, "")))
    file = tmp_path / "questions.jsonl"
    first = plain_asker(file=file)
    made = first.questions(documents)
    assert made == [["Which cat?", "Why?"], [stand_in(documents[1])], ["Who?"]]
    assert first.invented == 1
    monkeypatch.setattr(asking.Teacher, "targets", None)  # nobody is asked again
    second = plain_asker(file=file)
    assert second.questions(documents) == made
    assert second.invented == 1


def test_other_settings_ask_anew_and_a_damaged_line_is_made_again(tmp_path: Path) -> None:
    documents, file = [Document("The cat likes the box.", id="a")], tmp_path / "questions.jsonl"
    made = plain_asker(file=file).questions(documents)
    plain_asker(file=file, seed=1).questions(documents)
    plain_asker(2, file).questions(documents)
    assert len(file.read_text().splitlines()) == 3
    file.write_text(file.read_text()[:40] + "\n[]\n")
    assert plain_asker(file=file).questions(documents) == made


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("What is it?", "What is it?"),
        ("  Question: What is it? It is a cat.", "What is it?"),
        ("“Where is it?”", "Where is it?"),
        ("It is a cat.", ""),
        ("A list:\n1. What?", ""),
        ("?", ""),
        ("", ""),
    ],
)
def test_a_question_is_taken_from_an_answer(text: str, question: str) -> None:
    assert one_question(text) == question


@pytest.mark.parametrize(
    ("question", "about"),
    [("Which box?", True), ("Who likes boxes?", True), ("What is the answer?", False), ("何ですか?", True)],
)
def test_a_question_shares_a_word_with_its_document(question: str, about: bool) -> None:
    assert is_about(question, "The cat likes the box.") is about


def lines(*rows: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "data.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return path

    return write


def test_a_jsonl_line_is_an_exercise(tmp_path: Path) -> None:
    row = {"documents": ["a", {"text": "b", "id": "x"}], "questions": ["Q?", "R?"], "answers": ["ignored"]}
    made = read_exercises(lines(row, "", {"documents": ["c"], "question": "S?"})(tmp_path))
    assert [[d.text for d in each.documents] for each in made] == [["a", "b"], ["c"]]
    assert [each.questions for each in made] == [("Q?", "R?"), ("S?",)]
    assert made[0].documents[1].id == "x"


def test_a_line_ends_at_a_line_feed_only(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = {"documents": ["one\u2028two\x85three"], "question": "Q?"}
    path.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    [made] = read_exercises(path)
    assert made.documents[0].text == "one\u2028two\x85three"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 2: must be an object"),
        ([], "line 2: must be an object"),
        ({"question": "?"}, "line 2: documents: is missing; must be a list"),
        ({"documents": [], "question": "?"}, "line 2: documents: must be a list"),
        ({"documents": ["a"]}, "line 2: question: either"),
        ({"documents": ["a"], "question": "?", "questions": ["?"]}, "line 2: question: either"),
        ({"documents": ["a"], "questions": "?"}, "line 2: questions: must be a list"),
        ({"documents": ["a"], "questions": ["?", " "]}, "line 2: questions: must be a list"),
        ({"documents": ["a"], "question": " "}, "line 2: question: must be a text"),
        ({"documents": ["a"], "question": 3}, "line 2: question: must be a text"),
        ({"documents": ["a", 3], "question": "?"}, r"line 2: documents\[1\]: must be a text"),
        ({"documents": [{"text": 3}], "question": "?"}, r"line 2: documents\[0\].text"),
        ({"documents": ["a", " "], "question": "?"}, r"line 2: documents\[1\].text"),
        ({"documents": [{"text": "a", "id": ""}], "question": "?"}, r"line 2: documents\[0\].id"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        read_exercises(lines({"documents": ["good"], "question": "Q?"}, row)(tmp_path))
    assert "good" not in str(refused.value)


def test_an_unreadable_or_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("\n\n")
    for path, said in ((tmp_path / "e.jsonl", "no line"), (tmp_path / "none.jsonl", "cannot be read")):
        with pytest.raises(InputError, match=said):
            read_exercises(path)


def test_lines_that_share_a_document_stay_together() -> None:
    texts = [("a", "b"), ("b", "c"), ("d",), ("e",), ("e", "f"), ("g",), ("h",), ("i",), ("j",), ("k",)]
    made = [Exercise(tuple(Document(t, id=t) for t in each), ("?",)) for each in texts]
    split = split_exercises(made, Sets(held_out=0.3))
    of = {name: {d.text for each in getattr(split, name) for d in each.documents} for name in ("exercises", "held_out")}
    assert not of["exercises"] & of["held_out"]
    assert len(split.held_out) == 3
    assert len(split.exercises) == 7
    whole = split_exercises(made, Sets(held_out=0.0))
    assert whole == Data(tuple(made), ())


def test_lines_that_all_share_a_document_cannot_be_held_out() -> None:
    made = [Exercise((Document("a"), Document(f"b{n}")), ("?",)) for n in range(5)]
    with pytest.raises(InputError, match="share documents all over"):
        split_exercises(made, Sets())


def reading(tmp_path: Path, sets: Sets) -> Reading:
    model = tiny()
    return Reading(model, PromptTemplate(model.tokenizer, ""), sets, read_passages, len, 200, 8, tmp_path / "q.jsonl")


def test_biography_trains_on_other_people_than_it_validates_on(tmp_path: Path) -> None:
    made = reading(tmp_path, Sets((2, 3), 2, count=4, validation=2)).read(Source.parse("task:biography"))
    people = [{d.id for each in part for d in each.documents} for part in (made.exercises, made.held_out)]
    assert (len(made.exercises), len(made.held_out)) == (4, 2)
    assert not people[0] & people[1]


def test_hotpotqa_is_read_from_a_file_and_shares_no_paragraph(tmp_path: Path) -> None:
    rows = [
        {
            "_id": str(n), "question": f"Which {n}?", "answer": "x", "supporting_facts": [["A", 0], ["B", 0]],
            "context": [["A", [f"a{n}."]], ["B", [f"b{n}."]], ["C", [f"c{n % 4}."]]],
        }
        for n in range(8)
    ]  # fmt: skip
    path = tmp_path / "h.json"
    path.write_text(json.dumps(rows))
    made = reading(tmp_path, Sets((3,), validation=2)).read(Source.parse(f"task:hotpotqa={path}"))
    texts = [{d.text for each in part for d in each.documents} for part in (made.exercises, made.held_out)]
    assert len(made.held_out) == 2
    assert made.exercises
    assert not texts[0] & texts[1]


def test_a_validation_file_replaces_the_share(tmp_path: Path) -> None:
    path = lines({"documents": ["a"], "question": "Q?"})(tmp_path)
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"documents": ["v"], "question": "Q?"}))
    made = reading(tmp_path, Sets()).read(Source.parse(str(path)), held)
    assert [d.text for each in made.held_out for d in each.documents] == ["v"]
    assert len(made.exercises) == 1
