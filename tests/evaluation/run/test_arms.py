"""How arms are written, and which documents their prompts have."""

from __future__ import annotations

import dataclasses

import pytest

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.run.arms import find_arm, find_arms, partners
from kvquilt.evaluation.tasks.item import Item

ITEM = Item("one", tuple(Document(c * 3, id=c) for c in "abcd"), "Which?", ("aaa",), (0,), "one", "letters")
RANKING = [2, 0, 3, 1]


def names(written: str, **earlier: object) -> str:
    return "".join(document.id for document in find_arm(written).documents(ITEM, RANKING, earlier))  # type: ignore[arg-type]


def test_documents_of_an_arm() -> None:
    assert names("none") == names("full") == names("full-again") == "abcd"
    assert names("no-context") == ""
    assert [names(f"fewer-documents:{k}") for k in (1, 2, 3, 9)] == ["c", "ac", "acd", "abcd"]


def test_the_order_of_another_arm() -> None:
    moved = {"ledger": {"documents": [{"id": c} for c in "bdac"]}}
    assert names("full-in-order-of:retrieved-document", **{"retrieved-document": moved}) == "bdac"
    assert names("full-in-order-of:epic:k=2", **{"epic:k=2": {"ledger": None}}) == "abcd"


def test_controls_are_full_prefill() -> None:
    written = ["no-context", "fewer-documents:2", "full-again", "full-in-order-of:retrieved-document"]
    assert not any(find_arm(name).method.reuses for name in written)
    assert [find_arm(name).in_parts for name in written] == [False, False, True, False]
    assert find_arm("epic:k=2").method.name == "epic:k=2"


def test_an_oracle_knows_the_right_documents_and_the_retriever_does_not() -> None:
    item = dataclasses.replace(ITEM, gold=(3, 0))
    assert find_arm("oracle:retrieved-document").ranking(item, RANKING, None) == [3, 0, 2, 1]
    assert find_arm("retrieved-document").ranking(item, RANKING, None) == RANKING
    assert find_arm("none").ranking(item, RANKING, None) == ()


def test_whom_an_arm_follows() -> None:
    item = dataclasses.replace(ITEM, gold=(3, 0))
    assert find_arm("distractor:retrieved-document").ranking(item, RANKING, None) == [2, 1, 3, 0]
    for written in ("insert:target", "recompute:target", "recompute:target-last"):
        assert find_arm(written).ranking(item, RANKING, None) == (3, 0)
    assert find_arm("attended:retrieved-document:5%,order=given").ranking(item, RANKING, None) == ()


def test_others_are_drawn_and_fewer_are_among_more() -> None:
    def drawn(written: str, name: str = "one") -> list[int]:
        return list(find_arm(written).ranking(dataclasses.replace(ITEM, id=name), RANKING, None))

    assert drawn("insert:others=0") == []
    for seed in range(4):
        whole = drawn(f"insert:others=9,seed={seed}")
        assert sorted(whole) == [1, 2, 3]  # never the one that the answer rests on
        assert [drawn(f"insert:others={k},seed={seed}") for k in (1, 2, 3)] == [whole[:1], whole[:2], whole]
    orders = {tuple(drawn(f"insert:others=3,seed={seed}", name)) for seed in range(4) for name in ("one", "two")}
    assert len(orders) > 2
    assert find_arm("insert:others=2").seed == 0


def test_recomputing_the_target_moves_all_of_it_or_nothing() -> None:
    still, moved = (find_arm(f"recompute:{which}").method for which in ("target", "target-last"))
    assert (still.order, moved.order) == ("given", "target_last")
    assert moved.moved >= 100


def test_a_deranged_arm_has_the_documents_of_another_item() -> None:
    other = dataclasses.replace(ITEM, id="two", documents=(Document("Nothing.", id="x"), Document("Which one", id="y")))
    arm = find_arm("deranged:retrieved-document")
    assert arm.documents(ITEM, RANKING, {}, other) == other.documents
    assert arm.ranking(ITEM, RANKING, other) == [1, 0]


def test_methods_are_told_from_controls() -> None:
    methods = ["none", "epic:k=2", "retrieved-document", "attended:retrieved-document:5%,order=given"]
    controls = ["full", "no-context", "full-again", "fewer-documents:1", "deranged:none", "oracle:retrieved-document"]
    controls += ["distractor:retrieved-document", "insert:target", "insert:others=2,seed=1", "recompute:target"]
    assert [name for name in methods + controls if find_arm(name).is_method] == methods


def test_partners_are_alike_in_size_and_share_no_document() -> None:
    def item(name: str, *texts: str) -> Item:
        return Item(name, tuple(Document(text) for text in texts), "Which?", ("a",), (), name, "letters")

    items = [item("long", "a" * 90, "b" * 90), item("one", "c"), item("short", "d", "e"), item("shares", "d", "f")]
    found = partners(items)
    # the next larger that shares nothing, around the end
    assert {name: other.id for name, other in found.items()} == {
        "one": "short", "short": "long", "shares": "long", "long": "one"
    }  # fmt: skip
    with pytest.raises(InputError, match="shares no document"):
        partners(items[2:])


def test_arms_of_a_run_begin_with_both_references_and_come_once() -> None:
    assert [arm.name for arm in find_arms(["none", "full", "none", "no-context"])] == ["full", "no-context", "none"]
    assert [arm.name for arm in find_arms([])] == ["full", "no-context"]


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("nine", "did you mean 'none'"),
        ("auto", "name a method"),
        ("fewer-document:1", "did you mean 'fewer-documents'"),
        ("fewer-documents", "fewer-documents:K"),
        ("fewer-documents:0", "at least 1"),
        ("fewer-documents:" + "9" * 5000, "at least 1"),
        ("insert:others=" + "9" * 5000, "others=K,seed=N"),
        ("fewer-documents:x", "fewer-documents:K"),
        ("full-in-order-of:full", "keeps the given order"),
        ("full-in-order-of:nine", "unknown method"),
        (7, "unknown method"),
        ("oracle:epic:k=2", "follows the retriever"),
        ("oracle", "unknown method"),
        ("deranged:full", "a method that reuses"),
        ("deranged:nine", "unknown method"),
        ("distractor:none", "follows the retriever"),
        ("attended:retrieved-document:5%", "order=given"),
        ("attended:none", "order=given"),
        ("insert", "others=K,seed=N"),
        ("insert:others=x", "others=K,seed=N"),
        ("insert:others=1,sed=2", "others=K,seed=N"),
        ("recompute:others=1", "target-last"),
    ],
)
def test_what_is_no_arm(written: object, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        find_arm(written)


def test_an_order_comes_after_what_it_is_of() -> None:
    wrong = ["full-in-order-of:retrieved-document", "retrieved-document"]
    with pytest.raises(InputError, match="must come before"):
        find_arms(wrong)
    assert len(find_arms(wrong[::-1])) == 4
    with pytest.raises(InputError, match="list"):
        find_arms("none")
