"""The Biography task: people, splits, items and exercises keep what the task promises."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import pytest
from blake3 import blake3
from transformers import AutoTokenizer

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.biography import SYSTEM, BiographyTask
from kvquilt.evaluation.tasks.biography_words import (
    ATTRIBUTES,
    FAMILY,
    GIVEN,
    POOLS,
    QUESTIONS,
    SENTENCES,
    date,
)
from kvquilt.evaluation.tasks.item import Item
from kvquilt.prompt import segment_ids
from tests.evaluation.plain import plain
from tests.test_real_models import found

TASK = BiographyTask()
SPLITS = ("train", "tuning", "test")


def chi_square(observed: Iterable[int]) -> float:
    counts = list(observed)
    expected = sum(counts) / len(counts)
    return sum((c - expected) ** 2 / expected for c in counts)


def wording(pattern: str) -> re.Pattern[str]:
    """A sentence or question as a pattern for what was made of it."""
    return re.compile(re.sub(r"\\{\w\\}", r"[\\w ',-]+", re.escape(pattern)))


def test_pools_are_large_and_hold_nothing_twice() -> None:
    assert len(GIVEN) >= 120
    assert len(FAMILY) >= 200
    least = {"birth place": 80, "city": 80, "university": 60, "field": 40, "employer": 100}
    assert {name: len(pool) >= least[name] for name, pool in POOLS.items()} == dict.fromkeys(least, True)
    for pool in (GIVEN, FAMILY, *POOLS.values()):
        assert len(set(pool)) == len(pool)
    for wordings in (SENTENCES, QUESTIONS):
        assert set(wordings) == set(ATTRIBUTES)
        assert all(len(set(forms)) >= 5 for forms in wordings.values())


def test_no_value_stands_inside_another_value_a_name_or_a_wording() -> None:
    values = [value for pool in POOLS.values() for value in pool]
    wordings = [text for table in (SENTENCES, QUESTIONS) for forms in table.values() for text in forms]
    others = [text.lower() for text in (*values, *GIVEN, *FAMILY, *wordings, *SYSTEM.split())]
    found = [(v, other) for v in values for other in others if v.lower() in other and v.lower() != other]
    assert found == []
    assert len(set(values)) == len(values)
    assert [(name, v) for name in GIVEN + FAMILY for v in values if name.lower() in v.lower()] == []


def test_dates_are_known_in_several_forms() -> None:
    assert date(14, 3, 1971) == ("14 March 1971", "March 14, 1971", "1971-03-14", "14/03/1971")


def test_people_differ_within_a_task_and_between_seeds() -> None:
    everybody = [TASK.person(i) for i in range(TASK.people)]
    assert len({person.name for person in everybody}) == TASK.people
    assert len({person.document.id for person in everybody}) == TASK.people
    others = {BiographyTask(random_seed=1).person(i).name for i in range(TASK.people)}
    assert len(others & {person.name for person in everybody}) < TASK.people // 5


def test_a_person_states_every_fact_once() -> None:
    for index in range(0, TASK.people, 7):
        person = TASK.person(index)
        assert list(person.facts) == list(ATTRIBUTES)
        assert all(person.document.text.count(forms[0]) == 1 for forms in person.facts.values())
        assert person.document.text.count(person.name) == len(ATTRIBUTES)
        assert 1940 <= int(person.facts["birth date"][0][-4:]) <= 2004


def test_order_of_sentences_and_names() -> None:
    ordered = BiographyTask(sentences="given")
    for index in (3, 1500):
        person, facts = ordered.person(index), list(ordered.person(index).facts.values())
        assert person.facts == TASK.person(index).facts
        places = [person.document.text.index(forms[0]) for forms in facts]
        assert places == sorted(places)
    shuffled = [TASK.person(i) for i in range(300)]
    first = Counter(
        min(ATTRIBUTES, key=lambda a, person=p: person.document.text.index(person.facts[a][0]))  # type: ignore[misc]
        for p in shuffled
    )
    assert chi_square(first[a] for a in ATTRIBUTES) < 20.5  # 0.999 of 5 degrees of freedom


def test_the_name_may_stand_in_the_first_sentence_only() -> None:
    task = BiographyTask(name_in="first")
    for index in range(0, task.people, 13):
        person = task.person(index)
        head, *rest = re.split(r"(?<=\.) ", person.document.text)
        assert person.name in head
        assert all(person.given not in text and person.family not in text for text in rest)
        pronouns = {word.lower() for text in rest for word in re.findall(r"\b(?:he|his|she|her)\b", text, re.I)}
        assert pronouns <= {"he", "his"} or pronouns <= {"she", "her"}
        assert len(rest) == len(ATTRIBUTES) - 1


def test_splits_share_nobody_and_follow_the_shares() -> None:
    train, tuning, test = (set(TASK.split(split)) for split in SPLITS)
    assert (len(train), len(tuning), len(test)) == (900, 100, 1000)
    assert train | tuning | test == set(range(2000))
    seen = {
        split: {d.id for item in TASK.items(split, 100) for d in item.documents}
        | {d.id for exercise in TASK.exercises(split, 100) for d in exercise.documents}
        for split in SPLITS
    }
    assert not seen["train"] & seen["tuning"]
    assert not (seen["train"] | seen["tuning"]) & seen["test"]


def test_the_last_wordings_occur_in_the_test_split_only() -> None:
    sentences = [wording(forms[-1]) for forms in SENTENCES.values()]
    questions = [wording(forms[-1]) for forms in QUESTIONS.values()]
    for split in SPLITS:
        people = [TASK.person(i).document.text for i in TASK.split(split)]
        asked = [item.question for item in TASK.items(split, 300)]
        asked += [q for exercise in TASK.exercises(split, 100) for q in exercise.questions]
        expected = split == "test"
        assert [any(p.search(text) for text in people) for p in sentences] == [expected] * len(ATTRIBUTES)
        assert [any(p.fullmatch(q) for q in asked) for p in questions] == [expected] * len(ATTRIBUTES)


@pytest.mark.parametrize("documents", [2, 5, 15])
def test_the_answer_occurs_once_in_the_gold_document_and_in_no_other(documents: int) -> None:
    for item in TASK.items("test", 200, documents):
        assert len(item.documents) == documents
        (gold,) = item.gold
        counts = [document.text.lower().count(item.answers[0].lower()) for document in item.documents]
        assert counts == [int(i == gold) for i in range(documents)]
        assert not any(alias in d.text for alias in item.answers[1:] for d in item.documents)
        assert item.group == item.documents[gold].id
        assert not any(answer.lower() in item.question.lower() for answer in item.answers)


def test_family_names_differ_within_a_set_and_the_question_names_the_target() -> None:
    people = {person.document.id: person for person in map(TASK.person, range(TASK.people))}
    for item in TASK.items("train", 200):
        family = [people[d.id].family for d in item.documents]
        assert len(set(family)) == len(family)
        assert people[item.group].name in item.question
    for exercise in TASK.exercises("train", 200):
        family = [people[d.id].family for d in exercise.documents]
        assert len(set(family)) == len(family)
        names = [people[d.id].name for d in exercise.documents]
        assert all(sum(name in question for name in names) == 1 for question in exercise.questions)


def asked_attribute(item: Item) -> str:
    found = [a for a, forms in QUESTIONS.items() if any(wording(form).fullmatch(item.question) for form in forms)]
    assert len(found) == 1
    return found[0]


def test_place_attribute_and_target_are_uniform() -> None:
    items = TASK.items("test", 1000)
    places = Counter(item.gold[0] for item in items)
    assert chi_square(places[i] for i in range(5)) < 18.5  # 0.999 of 4 degrees of freedom
    attributes = Counter(asked_attribute(item) for item in items)
    assert chi_square(attributes[a] for a in ATTRIBUTES) < 20.5
    assert len({item.group for item in items}) == 1000, "everybody is asked about once before anybody is twice"
    assert len({item.id for item in items}) == 1000


def test_exercises_take_sizes_in_turn_and_ask_about_different_facts() -> None:
    made = TASK.exercises("train", 8, questions=12)
    assert [len(e.documents) for e in made] == [2, 3, 5, 7, 2, 3, 5, 7]
    for exercise in made:
        facts = set()
        for question in exercise.questions:
            attribute = next(a for a, forms in QUESTIONS.items() if any(wording(f).fullmatch(question) for f in forms))
            name = next(n for n in (d.text for d in exercise.documents) if question_name(question) in n)
            facts.add((name, attribute))
        assert len(facts) == 12
    assert [len(e.documents) for e in TASK.exercises("tuning", 3, documents=4)] == [4, 4, 4]


def question_name(question: str) -> str:
    found = re.search(rf"(?:{'|'.join(GIVEN)}) (?:{'|'.join(FAMILY)})", question)
    assert found is not None
    return found.group()


def test_the_same_arguments_give_the_same_bytes() -> None:
    """A changed word, order of draws or setting changes every result that was measured on the task."""
    made = [plain(item)[:7] for item in TASK.items("test", 64)]
    made += [plain(e) for e in TASK.exercises("train", 64)]
    made += [plain(i)[:7] for i in BiographyTask(3, 400, "given", "first").items("tuning", 8, 2, seed=1)]
    assert blake3(repr(made).encode()).hexdigest()[:32] == "6bddba4c5349167020a9ec6049d50bf6"


def test_a_smaller_count_is_a_head_of_a_larger_and_seeds_differ() -> None:
    assert TASK.items("test", 5) == TASK.items("test", 50)[:5]
    assert TASK.exercises("train", 5) == TASK.exercises("train", 50)[:5]
    assert TASK.items("test", 5) != TASK.items("test", 5, seed=1)
    assert TASK.exercises("train", 5) != TASK.exercises("train", 5, seed=1)


def test_as_a_task_its_test_split_is_called_evaluation() -> None:
    assert TASK.items("evaluation", 5, seed=2) == TASK.items("test", 5, seed=2)
    assert TASK.split("evaluation") == TASK.split("test")
    assert [len(TASK.items(split)) for split in ("train", "tuning", "evaluation", "test")] == [256, 128, 256, 256]
    few = BiographyTask(documents=3)
    assert few.items("tuning", 4) == TASK.items("tuning", 4, documents=3)
    assert few.items("tuning", 4, documents=2) == TASK.items("tuning", 4, documents=2)


def test_documents_are_short() -> None:
    """60 to 110 tokens with the tokenizer of SmolLM2."""
    folder, _ = found("smollm2")
    if folder.suffix == ".gguf":
        pytest.skip("smollm2: not unpacked in the cache yet")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lengths = [len(segment_ids(TASK.person(i).document, tokenizer)) for i in range(TASK.people)]
    assert min(lengths) >= 60
    assert max(lengths) <= 110


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: BiographyTask(people=19), "people"),
        (lambda: BiographyTask(people=10**6), "people"),
        (lambda: BiographyTask(sentences="sorted"), "sentences"),  # type: ignore[arg-type]
        (lambda: BiographyTask(name_in="last"), "name_in"),  # type: ignore[arg-type]
        (lambda: BiographyTask(documents=0), "documents"),
        (lambda: TASK.items("dev", 1), "split"),
        (lambda: TASK.items("test", 0), "count"),
        (lambda: TASK.items("test", 1, documents=0), "documents"),
        (lambda: TASK.items("test", 1, documents=True), "documents"),
        (lambda: TASK.items("test", 1, documents=241), "documents"),
        (lambda: BiographyTask(people=20).items("tuning", 1, documents=2), "documents"),
        (lambda: TASK.exercises("train", 1, documents=()), "documents"),
        (lambda: TASK.exercises("train", 1, documents=(2, 0)), "documents"),
        (lambda: TASK.exercises("train", 1, questions=13), "questions"),
        (lambda: TASK.person(2000), "index"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(call: object, field: str) -> None:
    with pytest.raises(InputError) as refused:
        call()  # type: ignore[operator]
    assert refused.value.field == field
