"""Needles: what is hidden where, what is asked, and that nothing but the needles answers."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from blake3 import blake3

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.leakage import check_apart
from kvquilt.evaluation.tasks.needle_words import ALL, NAMES, ONE, SEVERAL
from kvquilt.evaluation.tasks.niah import KINDS, NeedleTask, rough_tokens, topics
from tests.evaluation.plain import plain

NEEDLE = re.compile(r"The pass code of (\w+) is (\d{5})\.")
LINK = re.compile(r"(\w+) holds the same pass code as (\w+)\.")


def hay(split: str) -> tuple[str, ...]:
    """Three hundred sentences of a split's own, of five words each."""
    return tuple(f"Straw {n} of {split} rustles." for n in range(300))


def words(text: str) -> int:
    return len(text.split())


def small(kind: str, **more: Any) -> NeedleTask:
    return NeedleTask(kind, **({"documents": 5, "tokens": 40, "length": words, "haystack": hay} | more))  # type: ignore[arg-type]


def hidden(item: Item) -> list[tuple[int, str, str]]:
    """Document, name and code of every needle."""
    return [(n, *found) for n, d in enumerate(item.documents) for found in NEEDLE.findall(d.text)]


def chi_square(observed: list[int]) -> float:
    expected = sum(observed) / len(observed)
    return sum((n - expected) ** 2 / expected for n in observed)


def test_names_are_many_and_none_stands_in_another_or_in_the_haystack() -> None:
    assert len(set(NAMES)) == 384
    assert [(a, b) for a in NAMES for b in NAMES if a != b and a.lower() in b.lower()] == []
    text = " ".join(topics("tuning") + topics("evaluation")).lower()
    assert [name for name in NAMES if name.lower() in text] == []


def test_single() -> None:
    for item in small("single").items("evaluation", 30):
        ((place, name, code),) = hidden(item)
        assert item.gold == (place,)
        assert item.answers == (code,)
        assert (item.group, item.kind) == (name, "single")
        assert name in item.question


def test_multikey() -> None:
    for item in small("multikey", needles=7).items("evaluation", 30):
        found = hidden(item)
        assert len({name for _, name, _ in found}) == len({code for _, _, code in found}) == 7
        assert [(place, code) for place, name, code in found if name in item.question] == [
            (item.gold[0], item.answers[0])
        ]
        assert {n for n, _, _ in found} == set(range(5)), "all documents have some before one has two"


def test_multivalue() -> None:
    for item in small("multivalue", needles=3).items("evaluation", 30):
        found = hidden(item)
        assert {name for _, name, _ in found} == {item.group}
        assert sorted(code for _, _, code in found) == sorted(item.answers[0].split(", "))
        assert item.gold == tuple(sorted(n for n, _, _ in found))
        assert len(item.gold) == 3


def test_multiquery() -> None:
    for item in small("multiquery", needles=3).items("evaluation", 30):
        codes = {name: code for _, name, code in hidden(item)}
        asked = [name for name in re.findall(r"\w+", item.question) if name in codes]
        assert len(asked) == 3
        assert item.answers == (", ".join(codes[name] for name in asked),), "in the order of the question"
        assert re.search(rf"{asked[0]}, {asked[1]} and {asked[2]}", item.question)


@pytest.mark.parametrize("order", ["drawn", "forward", "backward"])
def test_chain(order: str) -> None:
    ahead = Counter()
    for item in small("chain", needles=3, order=order).items("evaluation", 200):
        codes = {name: (n, code) for n, name, code in hidden(item)}
        ((place, name, other),) = [(n, *f) for n, d in enumerate(item.documents) for f in LINK.findall(d.text)]
        assert name in item.question
        assert name not in codes, "its own document does not answer"
        assert len(codes) == 3
        assert item.answers == (codes[other][1],)
        assert item.gold == tuple(sorted((codes[other][0], place)))
        assert len(item.gold) == 2
        ahead[codes[other][0] < place] += 1
    expected = {"forward": {True: 200}, "backward": {False: 200}}
    assert ahead == expected.get(order, ahead)
    if order == "drawn":
        assert min(ahead.values()) > 70


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 2, 4])
def test_the_first_wanted_code_stands_where_it_should(kind: str, position: int) -> None:
    for item in small(kind, position=position).items("tuning", 20):
        first = item.answers[0].split(", ")[0]
        assert [n for n, d in enumerate(item.documents) if first in d.text] == [position]


def test_positions_are_drawn_uniformly_and_so_are_depths() -> None:
    items = small("single").items("evaluation", 1000)
    places = Counter(item.gold[0] for item in items)
    assert chi_square([places[n] for n in range(5)]) < 18.5  # 0.999 of 4 degrees of freedom
    depths = Counter()
    for item in items:
        before = item.documents[item.gold[0]].text.partition("The pass code")[0]
        depths[before.count("Straw")] += 1
    assert set(depths) == set(range(7)), "six sentences beside the needle: seven places"
    assert chi_square([depths[n] for n in range(1, 6)]) < 18.5


@pytest.mark.parametrize(("depth", "before"), [(0.0, 0), (0.5, 3), (1.0, 6)])
def test_depth(depth: float, before: int) -> None:
    for item in small("multikey", depth=depth).items("tuning", 10):
        text = item.documents[item.gold[0]].text
        assert text.partition("The pass code")[0].count("Straw") == before


@pytest.mark.parametrize("kind", KINDS)
def test_documents_fill_their_length_and_share_no_sentence(kind: str) -> None:
    for item in small(kind, tokens=50).items("tuning", 20):
        assert all(45 < words(d.text) <= 50 for d in item.documents)
        straws = [straw for d in item.documents for straw in re.findall(r"Straw \d+ of tuning rustles\.", d.text)]
        assert len(set(straws)) == len(straws) >= 5 * 7


def test_documentation_is_the_haystack() -> None:
    for split in NeedleTask.splits:
        (item,) = NeedleTask(tokens=512, documents=8).items(split, 1)
        assert all(400 < rough_tokens(d.text) <= 512 for d in item.documents)
        rest = " ".join(d.text for d in item.documents).replace("  ", " ")
        assert sum(sentence in rest for sentence in topics(split)) > 60


def test_splits_share_neither_names_nor_hay_and_one_wording_is_kept_for_evaluation() -> None:
    for kind, wordings in (("single", ONE), ("multivalue", ALL), ("multiquery", SEVERAL)):
        tuning, evaluation = (NeedleTask(kind, documents=4).items(split, 100) for split in NeedleTask.splits)  # type: ignore[arg-type]
        check_apart(tuning, evaluation)
        named = [{n for i in items for _, n, _ in hidden(i)} for items in (tuning, evaluation)]
        assert not named[0] & named[1]
        last = re.compile(re.escape(wordings[-1]).replace(r"\{names\}", ".+"))
        assert not any(last.fullmatch(item.question) for item in tuning)
        assert any(last.fullmatch(item.question) for item in evaluation)


def test_a_smaller_count_is_a_head_of_a_larger_and_seeds_differ() -> None:
    task = small("chain")
    assert task.items("tuning", 3) == task.items("tuning", 20)[:3]
    assert task.items("tuning", 3) != task.items("tuning", 3, seed=1)
    assert task.items("tuning", 3) != small("chain", random_seed=1).items("tuning", 3)
    assert [len(task.items(split)) for split in task.splits] == [128, 256]


def test_the_same_arguments_give_the_same_bytes() -> None:
    """A changed word or order of draws changes every result that was measured on the task."""
    made = [plain(i)[:7] for kind in KINDS for split in NeedleTask.splits for i in small(kind).items(split, 9)]
    assert blake3(repr(made).encode()).hexdigest()[:32] == "18c964c25fcf22c3511fa0db2b36f8fc"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"kind": "double"}, "kind"),
        ({"needles": 1}, "needles"),
        ({"needles": 65}, "needles"),
        ({"documents": 0}, "documents"),
        ({"documents": 1, "kind": "chain"}, "documents"),
        ({"tokens": 0}, "tokens"),
        ({"position": 5}, "position"),
        ({"position": -2}, "position"),
        ({"depth": 1.5}, "depth"),
        ({"depth": -0.5}, "depth"),
        ({"order": "up"}, "order"),
        ({"kind": "chain", "order": "forward", "position": 4}, "position"),
        ({"kind": "chain", "order": "backward", "position": 0}, "position"),
        ({"tokens": 11}, "tokens"),
        ({"documents": 40}, "documents"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        small(**({"kind": "single"} | wrong)).items("tuning", 1)
    assert refused.value.field == field
    with pytest.raises(InputError, match="split"):
        small("single").items("test")
