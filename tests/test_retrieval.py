"""BM25 ranking: the obvious document first, nothing printed, nothing random."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.retrieval import Index, rank, top_k, words

DOCUMENTS = [
    Document("The with statement wraps a block in a context manager.", id="with"),
    Document("A for loop visits the items of a sequence, one by one.", id="for"),
    Document("try and except handle an exception; finally always runs.", id="try"),
    Document("今日は東京の天気が良いです。", id="weather"),
    Document("京都の寺は古い。", id="temple"),
]


@pytest.mark.parametrize(
    ("question", "best"),
    [
        ("What does `with` do?", "with"),
        ("WITH STATEMENT", "with"),
        ("Which items does a LOOP visit?", "for"),
        ("how do I handle an exception", "try"),
        ("東京の天気は？", "weather"),
        ("古い寺", "temple"),
        ("寺", "temple"),
    ],
)
def test_the_best_document_comes_first(question: str, best: str) -> None:
    ranked = top_k(question, DOCUMENTS, 3)
    assert ranked[0].id == best
    assert len(ranked) == 3
    assert ranked[0].score == max(rank(question, DOCUMENTS))
    assert [d.score for d in ranked] == sorted((d.score for d in ranked), reverse=True)


@pytest.mark.parametrize("question", ["zebra quagga", "?!", "", "猫"])
def test_without_a_shared_word_the_order_given_stays(question: str) -> None:
    assert rank(question, DOCUMENTS) == [0.0] * 5
    assert [d.id for d in top_k(question, DOCUMENTS, 9)] == [d.id for d in DOCUMENTS]


def test_equal_documents_keep_their_order() -> None:
    documents = [Document("same words", id=name) for name in "cab"]
    assert [d.id for d in top_k("words", documents, 3)] == ["c", "a", "b"]
    assert [d.id for d in top_k("words", documents, 2)] == ["c", "a"]


def test_small_and_wordless_collections() -> None:
    assert rank("a", [Document("a b")])[0] > 0
    assert rank("a", [Document("!!")]) == [0.0]
    assert rank("a", [Document("!!"), Document("")]) == [0.0, 0.0]
    assert rank("a", []) == []
    assert top_k("a", [], 3) == []
    first, second = rank("a", [Document(""), Document("a")])
    assert second > first == 0.0


def test_parts_of_names_in_code_are_found() -> None:
    assert words("Call os.get_terminal_size(), __init__") == [
        "call", "os", "get_terminal_size", "get", "terminal", "size", "__init__", "init"
    ]  # fmt: skip
    assert words("日本go語") == ["日", "本", "日本", "go", "語"]
    assert words("Straße") == words("STRASSE")


def test_an_index_answers_many_questions_alike() -> None:
    index = Index(DOCUMENTS)
    for question in ("with", "loop", "with"):
        assert index.scores(question) == rank(question, DOCUMENTS)
    assert index.documents == tuple(DOCUMENTS)
    assert all(document.score is None for document in index.documents)


def test_scores_do_not_depend_on_the_hash_seed_and_nothing_is_printed() -> None:
    code = (
        "from tests.test_retrieval import DOCUMENTS; from kvquilt.retrieval import rank; import sys;"
        "sys.stdout.write(repr(rank('what is the with of a context and the for loop', DOCUMENTS)))"
    )
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, text=True, check=True)
        assert done.stderr == ""
        outputs.add(done.stdout)
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("question", "k", "field"), [("a", 0, "k"), ("a", -1, "k"), ("a", 1.5, "k"), (None, 1, "question")]
)
def test_malformed_requests_are_named(question: Any, k: Any, field: str) -> None:
    with pytest.raises(InputError) as raised:
        top_k(question, DOCUMENTS, k)
    assert raised.value.field == field
