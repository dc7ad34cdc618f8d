"""What becomes of retrieved texts, whatever framework found them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy
import pytest

from kvquilt import Document
from kvquilt.errors import InputError
from kvquilt.integrations.parts import content, document_parts

RYE, WHEAT = "Rye needs two days.", "Wheat needs one."


def part(id: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": "document", "id": id, "text": text, **more}


def test_order_ids_texts_and_scores_are_kept() -> None:
    found = document_parts([("b", RYE, 0.25), ("a", f" {WHEAT}\n", None)])
    assert found == [part("b", RYE, score=0.25), part("a", f" {WHEAT}\n")]
    assert content(found, "Which?") == [*found, {"type": "text", "text": "Which?"}]


@pytest.mark.parametrize("id", [None, "", " ", "x" * 513, "public/a", "a\0b", "\ud800"])
def test_without_an_id_that_a_server_takes_the_text_names_it(id: str | None) -> None:
    assert document_parts([(id, RYE, None)]) == [part(Document(RYE).id, RYE)]


def test_what_is_found_twice_stands_once_with_the_better_score() -> None:
    found = [("a", RYE, 0.25), (None, WHEAT, None), ("a", RYE, 0.5), (None, WHEAT, 0.75), ("a", RYE, None)]
    assert document_parts(found) == [part("a", RYE, score=0.5), part(Document(WHEAT).id, WHEAT, score=0.75)]


@pytest.mark.parametrize("id", ["a", "x" * 512])
def test_another_text_under_an_id_gets_one_of_its_own(id: str) -> None:
    first, second = document_parts([(id, RYE, None), (id, WHEAT, None), (id, WHEAT, None)])
    assert first == part(id, RYE)
    assert second["text"] == WHEAT
    assert second["id"].endswith(f"#{Document(WHEAT).id}")
    assert len(second["id"]) <= 512


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_scores_that_are_none_are_left_out(score: float) -> None:
    assert document_parts([("a", RYE, score)]) == [part("a", RYE)]


@pytest.mark.parametrize("score", [numpy.float32(0.5), Decimal("0.5")])
def test_scores_of_other_libraries_are_numbers(score: Any) -> None:
    assert document_parts([("a", RYE, score)])[0]["score"].hex() == (0.5).hex()


@pytest.mark.parametrize("text", ["", " ", "\n\t\n", "\u00a0\u2003"])
@pytest.mark.parametrize("id", [None, "a", ""])
def test_a_blank_text_is_left_out_and_the_others_stay(text: str, id: str | None) -> None:
    assert document_parts([(id, text, 0.5)]) == []
    assert document_parts([("a", RYE, 0.25), (id, text, 0.5), ("b", WHEAT, None)]) == [
        part("a", RYE, score=0.25), part("b", WHEAT)
    ]  # fmt: skip


@pytest.mark.parametrize("text", [None, "a\x00b", 3])
def test_what_has_no_text_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match=r"documents|Document\.text"):
        document_parts([("a", text, None)])


@pytest.mark.parametrize("score", ["high", [0.5], 10**400])
def test_a_score_that_is_no_number_is_refused(score: Any) -> None:
    with pytest.raises(InputError, match=r"scores.*'a'"):
        document_parts([("a", RYE, score)])
