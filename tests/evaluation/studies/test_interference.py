"""The same questions among other company: what stands there, how much of it, where, and what near-duplicates state."""

from __future__ import annotations

import re

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.studies import interference
from kvquilt.evaluation.studies.interference import KINDS, PLACES, STRUCTURES, Cell, Target, cells, targets, task_of
from kvquilt.evaluation.studies.near_duplicates import rewritten
from kvquilt.evaluation.tasks.api_docs import ApiDocsTask, is_stated
from kvquilt.evaluation.tasks.biography import BiographyTask

MOST = 4


def length(text: str) -> int:
    return len(text.split())


def made(kind: str, count: int = 6) -> list[Target]:
    return targets(kind, count, MOST, length)


def test_cells_are_all_combinations_and_one_alone() -> None:
    names = [cell.name for cell in cells((1, 4), ("first", "last"), ("I0", "I2"))]
    assert names == ["I0", "I2-1-first", "I2-1-last", "I2-4-first", "I2-4-last"]
    assert [cell.name for cell in cells((3,), ("middle",), ("I1", "I3"))] == ["I1-3-middle", "I3-3-middle"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_stands_where_it_is_told_to_among_as_much_text(kind: str) -> None:
    for target in made(kind):
        whole = set()
        for cell in cells((1, 3, MOST), PLACES, STRUCTURES):
            item = target.placed(cell, length)
            (at,) = item.gold
            assert item.documents[at] == target.document
            assert item.kind == cell.name
            assert item.id.endswith(cell.name)
            fillers = [document for document in item.documents if document.id == "filler"]
            assert len(item.documents) == 1 + cell.distractors + len(fillers) <= cell.distractors + 2
            expected = {"first": 0, "middle": len(item.documents) // 2, "last": len(item.documents) - 1}
            assert at == expected[cell.place]
            if cell.structure != "I0":
                whole.add(sum(length(document.text) for document in item.documents))
        # within a sentence or two of each other, whoever stands there
        assert max(whole) <= target.tokens
        assert min(whole) > 0.85 * target.tokens
        assert len(target.placed(Cell("I0"), length).documents) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_company_is_of_its_kind_and_never_answers(kind: str) -> None:
    for target in made(kind):
        answer = target.item.answers[0]
        assert is_stated(answer, target.document.text)
        for structure in ("I1", "I2", "I3"):
            item = target.placed(Cell(structure, MOST, "last"), length)
            assert not any(is_stated(answer, document.text) for document in item.documents[:-1])
        few, many = ({d.id for d in target.placed(Cell("I2", k, "first"), length).documents} for k in (2, MOST))
        assert few - {"filler"} < many
        assert all(document.id.startswith("python-help-") for document in target.neutral)


def test_near_duplicates_of_a_person() -> None:
    task = task_of("biography", MOST)
    assert isinstance(task, BiographyTask)
    for target in made("biography"):
        person = task.person(int(target.document.id.rpartition("-")[2]))
        values = [forms[0] for forms in person.facts.values()]
        assert len({document.text for document in target.near}) == MOST
        for document in target.near:
            assert person.name not in document.text
            assert document.text.count(person.family) == 6
            assert sum(value in document.text for value in values) == 4
            assert target.item.answers[0] not in document.text


def test_near_duplicates_of_a_function() -> None:
    task = task_of("api_docs", MOST)
    assert isinstance(task, ApiDocsTask)
    entries = {f"{e.module}.{e.name}": e for e in task.entries("evaluation")}
    for target in made("api_docs"):
        entry = entries[target.document.id]
        assert len({document.id for document in target.near}) == MOST
        for document in target.near:
            module, name = document.id.split(".")
            assert (module != entry.module, name) == (True, entry.name)
            assert document.text.startswith(f"{module}.{name}(source, ")
            assert re.findall(r"(\w+)=", document.text) == re.findall(r"(\w+)=", entry.text)
            stated = {fact.answers[0] for fact in entry.facts if fact.kind != "function"}
            assert not [value for value in stated if is_stated(value, document.text)]


def test_a_smaller_number_of_questions_is_a_head_of_a_larger() -> None:
    few, many = (targets("api_docs", count, 2, length) for count in (2, 5))
    assert [t.item.id for t in many][:2] == [t.item.id for t in few]
    assert [t.item for t in targets("api_docs", 2, 2, length, seed=1)] != [t.item for t in few]


def test_words_are_exchanged_whole_and_all_at_once() -> None:
    changes = {"12": "7", "7": "5", "a.b": "c.b", "Ann Oak": "Eve Oak"}
    text = "a.b(x=12, y=7) 1.12 127 7. Ann Oak's, Ann Oakley's"
    assert rewritten(text, changes) == "c.b(x=7, y=5) 1.12 127 5. Eve Oak's, Ann Oakley's"


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: Cell("I4", 1), "I0, I1, I2, I3"),  # type: ignore[arg-type]
        (lambda: Cell("I0", 1), "I0 has none"),
        (lambda: Cell("I2", 0), "at least one"),
        (lambda: Cell("I2", 1, "end"), "first, middle, last"),  # type: ignore[arg-type]
        (lambda: targets("people", 1, 1, length), "biography, api_docs"),
        (lambda: targets("biography", 0, 1, length), "from 1"),
        (lambda: made("biography", 1)[0].placed(Cell("I2", MOST + 1), length), "at most 4"),
    ],
)
def test_what_is_no_setting(make: object, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_near_duplicates_as_can_differ(kind: str) -> None:
    most = interference.MOST[kind]
    for target in targets(kind, 8, most, length):
        assert len({document.text for document in target.near}) == most
    with pytest.raises(InputError, match=f"distractors: must be an integer from 1 to {most}"):
        targets(kind, 1, most + 1, length)
