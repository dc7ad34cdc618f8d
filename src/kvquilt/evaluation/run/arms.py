"""Arms of a run: methods as they are written, and controls: full prefill of less, or a method on other terms."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kvquilt.document import Document
from kvquilt.errors import InputError, nearest
from kvquilt.evaluation.run.attended import AttendedDocument
from kvquilt.evaluation.run.inserted import Inserted
from kvquilt.evaluation.tasks.item import Item
from kvquilt.placement import Order
from kvquilt.repair.presets import METHODS, Method, find_method
from kvquilt.repair.retrieved_document import RetrievedDocument
from kvquilt.repair.written import split
from kvquilt.retrieval import ranked_documents

FULL, WITHOUT, AGAIN = "full", "no-context", "full-again"
FEWER, IN_ORDER_OF = "fewer-documents", "full-in-order-of"
ORACLE, DISTRACTOR, DERANGED, ATTENDED = "oracle", "distractor", "deranged", "attended"
INSERT, RECOMPUTE = "insert", "recompute"
CONTROLS = (WITHOUT, AGAIN, FEWER, IN_ORDER_OF, ORACLE, DISTRACTOR, DERANGED, ATTENDED, INSERT, RECOMPUTE)

_DIGITS = 18
_WHOLE = "retrieved-document:documents=1000000"  # every document that is ranked


class Leading(StrEnum):
    """Which documents an arm takes for the best: the retriever's; those that the answer rests on, or the others, before
    the retriever's; the former and no other; some of the others, drawn, and no other."""

    RETRIEVED = "retrieved"
    GOLD = "gold"
    DISTRACTORS = "distractors"
    TARGET = "target"
    OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm.

    Attributes:
        name: as it was written.
        method: that reads the prompt.
        keep: documents in the prompt, the retriever's best in their own order; None for all.
        in_parts: full prefill in two forwards: the floor that rounding puts under every measurement.
        order_of: the arm, earlier in the run, whose order of documents this one has.
        leading: the documents that its method takes for the best.
        others, seed: how many of the other documents are drawn; fewer of the same seed are among more.
        deranged: the prompt has the documents of another item.
    """

    name: str
    method: Method
    keep: int | None = None
    in_parts: bool = False
    order_of: str = ""
    leading: Leading = Leading.RETRIEVED
    others: int = 0
    seed: int = 0
    deranged: bool = False

    @property
    def is_method(self) -> bool:
        """Whether it is what the run is about, and no control."""
        return self.method.reuses and self.leading is Leading.RETRIEVED and not self.deranged

    @property
    def has_a_cost(self) -> bool:
        """Whether its ledger and its time say what it takes: what is inserted is computed beside both."""
        return not isinstance(self.method.correction, Inserted)

    def ranking(self, item: Item, ranking: Sequence[int], other: Item | None) -> Sequence[int]:
        """What the arm's method takes for the retriever's, of the documents in its prompt; empty if it asks none."""
        rest = [i for i in ranking if i not in item.gold]
        if self.leading is Leading.TARGET:
            return item.gold
        if self.leading is Leading.OTHERS:
            rest.sort()
            return random.Random(f"others {self.seed} {item.id}").sample(rest, len(rest))[: self.others]
        if not self.method.needs_ranking:
            return ()
        if self.deranged and other is not None:
            return ranked_documents(item.question, other.documents)
        if self.leading is Leading.RETRIEVED:
            return ranking
        return [*item.gold, *rest] if self.leading is Leading.GOLD else [*rest, *item.gold]

    def documents(
        self,
        item: Item,
        ranking: Sequence[int],
        earlier: Mapping[str, Mapping[str, Any]],
        other: Item | None = None,
    ) -> tuple[Document, ...]:
        """Of the item, those that stand in this arm's prompt, in their order.

        Args:
            ranking: indices of the item's documents, the retriever's best first.
            earlier: lines of the item's earlier arms by name.
            other: whose documents a deranged arm has.
        """
        if self.deranged and other is not None:
            return other.documents
        if self.keep is not None:
            return tuple(item.documents[i] for i in sorted(ranking[: self.keep]))
        if self.order_of:
            ledger = earlier[self.order_of]["ledger"]
            named = {document.id: document for document in item.documents}
            # an arm that was refused has no order of its own
            return item.documents if ledger is None else tuple(named[use["id"]] for use in ledger["documents"])
        return item.documents


def find_arm(written: object) -> Arm:
    """The arm that `written` describes: a method, or one of these controls.

    ``no-context``: no document. ``fewer-documents:K``: only the retriever's best K, what a user could do instead.
    ``full-again``: the whole prompt in another layout. ``full-in-order-of:ARM``: the whole prompt in the order that
    an arm which moves documents gave them. ``deranged:METHOD``: a method over the documents of another item, which
    cannot help.

    ``oracle:METHOD``: a method that follows the retriever, which finds the right documents;
    ``distractor:METHOD``: which finds the best of the wrong ones. ``attended:METHOD``, a method itself: the document
    that the question attends to most, in the retriever's place.

    ``recompute:target``, ``recompute:target-last``: all documents that the answer rests on are computed again, where
    they stand, or next to the question. ``insert:target``: they have full prefill's keys and values instead;
    ``insert:others=K,seed=N``: K of the others have. Where an item does not say which they are, nothing is done.

    Raises:
        InputError: unknown name or option; the message gives the nearest.
    """
    if not isinstance(written, str):
        return Arm("", find_method(written))
    name, options = split(written)
    full = METHODS["full"]
    if written == WITHOUT:
        return Arm(written, full, keep=0)
    if written == AGAIN:
        return Arm(written, full, in_parts=True)
    if name == FEWER:
        if len(options) != 1 or (keep := _count(options[0])) is None or keep < 1:
            raise InputError("methods", f"is written {FEWER}:K, K being at least 1", written)
        return Arm(written, full, keep=keep)
    if name == IN_ORDER_OF:
        of = written.partition(":")[2]
        if not find_arm(of).method.reuses:
            raise InputError("methods", "full prefill keeps the given order", written)
        return Arm(written, full, order_of=of)
    if name in (ORACLE, DISTRACTOR, DERANGED, ATTENDED):
        return _on_terms(written, name, find_method(written.partition(":")[2]))
    if name in (INSERT, RECOMPUTE):
        return _of_documents(written, name, options)
    if name not in METHODS and name != "auto":
        raise InputError("methods", f"unknown method {name!r}{nearest(name, [*METHODS, *CONTROLS])}")
    return Arm(written, find_method(written))


def _on_terms(written: str, name: str, method: Method) -> Arm:
    """A method on other terms than its own."""
    selector = method.selector
    if name == DERANGED and method.reuses:
        return Arm(written, method, deranged=True)
    if name == ORACLE and method.needs_ranking:
        return Arm(written, method, leading=Leading.GOLD)
    if name == DISTRACTOR and method.needs_ranking:
        return Arm(written, method, leading=Leading.DISTRACTORS)
    if name == ATTENDED and isinstance(selector, RetrievedDocument) and method.order is Order.GIVEN:
        return Arm(written, replace(method, selector=AttendedDocument(selector)))
    asks = {DERANGED: "reuses", ATTENDED: "recomputes the retriever's document where it stands (order=given)"}
    raise InputError(
        "methods", f"is written {name}:METHOD, a method that {asks.get(name, 'follows the retriever')}", written
    )


def _of_documents(written: str, name: str, options: Sequence[str]) -> Arm:
    """Documents that are named, and not chosen by a method."""
    if name == RECOMPUTE and options in (["target"], ["target-last"]):
        order = Order.GIVEN if options == ["target"] else Order.TARGET_LAST
        return Arm(written, find_method(f"{_WHOLE},order={order}"), leading=Leading.TARGET)
    given = replace(METHODS["none"], correction=Inserted())
    if name == INSERT and options == ["target"]:
        return Arm(written, given, leading=Leading.TARGET)
    fields = {"seed": "0", **dict(option.split("=", 1) for option in options if "=" in option)}
    others, seed = _count(fields.get("others", "")), _count(fields["seed"])
    whole = fields.keys() == {"others", "seed"} and len(options) <= 2
    if name == INSERT and whole and others is not None and seed is not None:
        return Arm(written, given, leading=Leading.OTHERS, others=others, seed=seed)
    form = "target or target-last" if name == RECOMPUTE else "target, or others=K,seed=N"
    raise InputError("methods", f"is written {name}: and then {form}", written)


def _count(written: str) -> int | None:
    """A whole number from 0; None where it is none, or of more digits than anything has."""
    return int(written) if written.isdecimal() and len(written) <= _DIGITS else None


def measured(arms: Sequence[Arm], refused: Collection[str]) -> tuple[Arm, ...]:
    """Those of which a run has lines: not `refused`, nor an order of one that is."""
    return tuple(arm for arm in arms if arm.name not in refused and arm.order_of not in refused)


def partners(items: Sequence[Item]) -> dict[str, Item]:
    """Of every item another one, of documents about as many and as long, that shares none with it.

    Raises:
        InputError: an item shares a document with every other.
    """
    by_size = sorted(items, key=lambda item: (len(item.documents), sum(len(d.text) for d in item.documents)))
    texts = {item.id: {document.text for document in item.documents} for item in items}
    found = {}
    for n, item in enumerate(by_size):
        following = (by_size[(n + step) % len(by_size)] for step in range(1, len(by_size)))
        other = next((each for each in following if texts[each.id].isdisjoint(texts[item.id])), None)
        if other is None:
            raise InputError("methods", f"{DERANGED} needs another item that shares no document with it", item.id)
        found[item.id] = other
    return found


def find_arms(methods: Sequence[str]) -> tuple[Arm, ...]:
    """The arms of a run, each once: `full` and `no-context`, then `methods` in their order.

    Raises:
        InputError: no list, an unknown arm, an order of an arm that does not come before.
    """
    if isinstance(methods, str):
        raise InputError("methods", "must be a list of methods", methods)
    arms = tuple(find_arm(name) for name in dict.fromkeys((FULL, WITHOUT, *methods)))
    for place, arm in enumerate(arms):
        if arm.order_of and arm.order_of not in {earlier.name for earlier in arms[:place]}:
            raise InputError("methods", f"{arm.order_of} must come before it", arm.name)
    return arms
