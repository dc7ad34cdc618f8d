"""What is shared between two sets is found and named."""

from __future__ import annotations

import pytest

from kvquilt.document import Document
from kvquilt.errors import InputError, LeakageError
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.leakage import check_apart, check_documents_apart, digests, manifest

LONG = "The Amber is a river that passes Drumford, where it turns to the south and to the sea, slowly. " * 2


def item(name: str, texts: list[str], question: str = "", group: str = "", task: str = "rivers") -> Item:
    documents = tuple(Document(text, id=f"{name}-{n}") for n, text in enumerate(texts))
    return Item(name, documents, question or f"Where is {name}?", ("here",), (0,), group or name, task)


def test_sets_that_share_nothing() -> None:
    check_apart([item("a", ["one", "two"])], [item("b", ["three"]), item("c", ["twofold"])])
    check_apart([item("a", ["one"], group="g")], [item("b", ["two"], group="g", task="towns")])
    check_apart([], [item("a", ["one"])])


def test_everything_that_is_shared_is_named() -> None:
    first = [item("a", ["one", "two", "Three  and\nfour."]), item("b", ["five"], "What  is it?", "g")]
    second = [item("c", ["TWO", "three and four."], "what is IT?", "g"), item("d", ["two"], group="a")]
    with pytest.raises(LeakageError, match=r"documents a-1, a-2; questions b; groups a, g") as refused:
        check_apart(first, second)
    assert isinstance(refused.value, InputError)
    assert refused.value.shared == {"documents": ("a-1", "a-2"), "questions": ("b",), "groups": ("a", "g")}
    assert "four" not in str(refused.value), "no text of a document in a message"


def test_only_some_are_named_in_the_message() -> None:
    some = item("a", [str(n) for n in range(9)])
    with pytest.raises(LeakageError, match=r"documents a-0, a-1, a-2 and 6 more$") as refused:
        check_apart([some], [item("b", [str(n) for n in range(9)])])
    assert len(refused.value.shared["documents"]) == 9


def test_a_paragraph_is_known_with_and_without_its_title() -> None:
    assert set(digests(LONG)) < set(digests("Amber\n" + LONG))
    for one, other in ((LONG, "Amber\n" + LONG), ("River\n" + LONG, "Amber\n" + LONG)):
        with pytest.raises(LeakageError, match="documents a-0"):
            check_apart([item("a", [one])], [item("b", [other])])
    check_apart([item("a", ["Amber\nIt is a river."])], [item("b", ["Fallow\nIt is a river."])])


def test_a_manifest_refuses_documents() -> None:
    refused = manifest([item("a", ["one", "two"]), item("b", ["two", "three"])])
    assert len(refused) == 3
    assert all(len(digest) == 64 for digest in refused)
    check_documents_apart("data", [Document("four", id="x")], refused)
    with pytest.raises(LeakageError, match=r"data: must be apart, but share documents x$"):
        check_documents_apart("data", [Document(" Two\n", id="x"), Document("four", id="y")], refused)
    check_documents_apart("data", [Document("two", id="x")], manifest([]))
