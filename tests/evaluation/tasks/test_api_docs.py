"""Questions about functions: facts hold by the code, documents state them, and no other document does."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.api_docs import ApiDocsTask, is_stated
from kvquilt.evaluation.tasks.api_invented import invented
from kvquilt.evaluation.tasks.api_library import QUESTIONS, Entry, literals
from kvquilt.evaluation.tasks.api_stdlib import stdlib
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.leakage import check_apart
from tests.evaluation.plain import plain

SOURCES = ("stdlib", "invented")
LIBRARIES = {"stdlib": stdlib(), "invented": invented(0)}
ENTRIES = {source: [entry for bundle in bundles for entry in bundle] for source, bundles in LIBRARIES.items()}


def facts(source: str, kind: str) -> list[tuple[Entry, Any]]:
    return [(entry, fact) for entry in ENTRIES[source] for fact in entry.facts if fact.kind == kind]


def test_what_stands_whole() -> None:
    assert [is_stated("4.7", text) for text in ("4.7", "in 4.7.", "14.7", "4.71", "4.7.1", "1.4.7")] == [True] * 2 + [
        False
    ] * 4
    assert [is_stated("fold", text) for text in ("a.fold(b)", "fold: int", "a_fold", "folds", "")] == [True] * 2 + [
        False
    ] * 3
    assert is_stated("'utf-8'", "encoding='utf-8')")


def function(entry: Entry) -> Any:
    held = importlib.import_module(entry.module)
    for name in entry.name.split("."):
        held = getattr(held, name)
    return held


@pytest.mark.parametrize("source", SOURCES)
def test_every_fact_stands_in_its_document(source: str) -> None:
    for entry in ENTRIES[source]:
        assert entry.text.startswith(f"{entry.module}.{entry.name}(")
        for fact in entry.facts:
            assert is_stated(fact.answers[0], entry.text), (entry.name, fact)
    names = [f"{entry.module}.{entry.name}" for entry in ENTRIES[source]]
    assert len(set(names)) == len(names)


def test_defaults_and_parameters_are_those_of_the_code() -> None:
    for entry, fact in facts("stdlib", "default"):
        default = inspect.signature(function(entry)).parameters[fact.about].default
        assert fact.answers[0] == repr(default)
        assert default not in (None, True, False, 0, 1, -1, "")
    for entry, fact in facts("stdlib", "parameter"):
        place = ("first", "second", "third", "fourth", "fifth").index(fact.about)
        assert list(inspect.signature(function(entry)).parameters)[place] == fact.answers[0]
        assert "." not in entry.name


def test_exceptions_and_classes_are_those_of_the_code_and_named_once() -> None:
    for kind, of in (("exception", BaseException), ("returned", object)):
        for entry, fact in facts("stdlib", kind):
            (name,) = fact.answers
            held = getattr(importlib.import_module(entry.module), name, None) or getattr(builtins, name)
            assert issubclass(held, of)
            verb = {"exception": "rais", "returned": "return"}[kind]
            assert re.search(rf"{verb}\w*\s+(?:an?\s+|the\s+)?(?:new\s+)?`*{name}\b", entry.text, re.I)
            if kind == "exception":
                assert set(re.findall(r"\b[A-Z]\w*(?:Error|Exception)\b", entry.text.partition("\n")[2])) <= {name}
    known = {(entry.module, entry.name): fact.answers for entry, fact in facts("stdlib", "exception")}
    assert known["queue", "Queue.get_nowait"] == ("Empty",)
    assert ("shutil", "copytree") not in known, "its help text names several"


def test_there_is_enough_of_the_standard_library() -> None:
    kinds = Counter(fact.kind for entry in ENTRIES["stdlib"] for fact in entry.facts)
    assert min(kinds[kind] for kind in ("default", "parameter")) > 80
    assert kinds["exception"] > 30
    assert kinds["returned"] > 5
    texts = [entry.text.partition("\n")[2] for entry in ENTRIES["stdlib"]]
    assert len(set(texts)) == len(texts) > 500


def test_nothing_says_where_it_was_made() -> None:
    """The paths of one installation would make other items of another, and stand in what is published."""
    places = [sys.executable, sys.prefix, sys.base_prefix, str(Path.home())]
    texts = [entry.text + repr(entry.facts) for module in stdlib() for entry in module]
    assert [text for text in texts for place in places if place in text and place not in ("/", "/usr")] == []


def test_the_invented_library() -> None:
    pairs = LIBRARIES["invented"]
    assert len(pairs) == 30
    for pair in pairs:
        assert len({entry.module for entry in pair}) == 2
        assert set(Counter(entry.name for entry in pair).values()) == {2}, "every function has a twin"
    for kind in ("exception", "function"):
        named = [fact.about + fact.answers[0] for _, fact in facts("invented", kind)]
        assert len(set(named)) == len(named) == 360
    for entry in ENTRIES["invented"]:
        assert Counter(fact.kind for fact in entry.facts) == {"default": 3, "exception": 1, "function": 1, "version": 1}
        assert not any(hasattr(builtins, fact.answers[0]) for fact in entry.facts)
    real = {entry.module for entry in ENTRIES["invented"]} & set(sys.stdlib_module_names)
    assert not real


def test_a_literal_in_every_spelling() -> None:
    assert literals("utf-8") == ("'utf-8'", '"utf-8"', "utf-8")
    assert literals(" ") == ("' '", '" "')
    assert literals(b"x") == ("b'x'",)
    assert literals(0.5) == ("0.5",)


@pytest.mark.parametrize("source", SOURCES)
def test_only_the_gold_document_answers(source: str) -> None:
    for item in ApiDocsTask(source).items("evaluation", 60):  # type: ignore[arg-type]
        (gold,) = item.gold
        assert [is_stated(item.answers[0], d.text) for d in item.documents] == [n == gold for n in range(5)]
        assert item.documents[gold].id.startswith(f"{item.group}.")


@pytest.mark.parametrize("source", SOURCES)
def test_kinds_take_turns_and_facts_come_once(source: str) -> None:
    task = ApiDocsTask(source)  # type: ignore[arg-type]
    items = task.items("tuning")
    asked = Counter((item.documents[item.gold[0]].id, item.answers, kind_of(item)) for item in items)
    own = {fact.kind for entry in ENTRIES[source] for fact in entry.facts}
    assert {kind_of(item) for item in items[: len(own)]} == own
    assert all(item.kind == kind_of(item) for item in items)
    names = {(key[0], key[2]) for key in asked}
    assert len(names) > len(items) / 2
    assert len({item.id for item in items}) == len(items)
    assert task.items("tuning", 5) == items[:5]
    assert task.items("tuning", 5, seed=1) != items[:5]


def kind_of(item: Item) -> str:
    patterns = {
        kind: [re.sub(r"\\{\w\\}", ".+", re.escape(wording)) for wording in wordings]
        for kind, wordings in QUESTIONS.items()
    }
    (kind,) = [k for k, found in patterns.items() if any(re.fullmatch(p, item.question) for p in found)]
    return kind


@pytest.mark.parametrize("source", SOURCES)
def test_splits_share_no_module_and_one_wording_is_kept_for_evaluation(source: str) -> None:
    task = ApiDocsTask(source)  # type: ignore[arg-type]
    tuning, evaluation = (task.items(split) for split in task.splits)
    check_apart(tuning, evaluation)
    modules = [{entry.module for entry in task.entries(split)} for split in task.splits]
    assert not modules[0] & modules[1]
    for wordings in QUESTIONS.values():
        last = re.compile(re.sub(r"\\{\w\\}", ".+", re.escape(wordings[-1])))
        assert not any(last.fullmatch(item.question) for item in tuning)
    assert ApiDocsTask(source, random_seed=1).entries("tuning") != task.entries("tuning")  # type: ignore[arg-type]


def test_company() -> None:
    def modules(company: str, documents: int = 5) -> list[Counter[bool]]:
        items = ApiDocsTask("invented", documents, company).items("evaluation", 40)  # type: ignore[arg-type]
        return [Counter(d.id.startswith(f"{item.group}.") for d in item.documents) for item in items]

    assert all(found == {True: 5} for found in modules("module"))
    assert all(found == {True: 6, False: 4} for found in modules("module", 10) if found[True] == 6)
    assert all(found == {True: 1, False: 4} for found in modules("others"))
    assert all(found == {True: 4, False: 1} for found in modules("twins"))
    for item in ApiDocsTask("invented", 2, "twins").items("evaluation", 40):
        assert len({d.id.partition(".")[2] for d in item.documents}) == 1
        assert len({d.id.partition(".")[0] for d in item.documents}) == 2


def test_the_same_arguments_give_the_same_bytes() -> None:
    """A changed word or order of draws changes every result that was measured on the task."""
    made = [plain(i)[:7] for s in ApiDocsTask.splits for i in ApiDocsTask("invented").items(s, 40)]
    made += [plain(i)[:7] for i in ApiDocsTask("invented", 3, "twins", 2).items("tuning", 9, seed=1)]
    assert blake3(repr(made).encode()).hexdigest()[:32] == "699a1bb4ebbf4dbe583998f8a3ef157f"


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="help texts differ between versions; pinned for 3.11.7")
def test_the_standard_library_gives_the_same_bytes() -> None:
    made = [plain(i)[:7] for s in ApiDocsTask.splits for i in ApiDocsTask().items(s, 40)]
    assert blake3(repr(made).encode()).hexdigest()[:32] == "7965fa6e523c87220b69dd8d948cc4a2"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"source": "real"}, "source"),
        ({"company": "nobody"}, "company"),
        ({"company": "twins"}, "company"),
        ({"documents": 0}, "documents"),
        ({"documents": 2000}, "documents"),
        ({"documents": 200, "source": "invented"}, "documents"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        ApiDocsTask(**wrong).items("tuning", 1)
    assert refused.value.field == field
