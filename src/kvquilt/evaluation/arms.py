"""Arms of a run: methods as they are written, and controls, which read by full prefill what is not the whole prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.item import Item
from kvquilt.repair.presets import METHODS, Method, find_method
from kvquilt.repair.written import split

FULL, WITHOUT, AGAIN = "full", "no-context", "full-again"
FEWER, IN_ORDER_OF = "fewer-documents", "full-in-order-of"


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm.

    Attributes:
        name: as it was written.
        method: that reads the prompt.
        keep: documents in the prompt, the retriever's best in their own order; None for all.
        in_parts: full prefill in two forwards: the floor that rounding puts under every measurement.
        order_of: the arm, earlier in the run, whose order of documents this one has.
    """

    name: str
    method: Method
    keep: int | None = None
    in_parts: bool = False
    order_of: str = ""

    def documents(
        self, item: Item, ranking: Sequence[int], earlier: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Document, ...]:
        """Of the item, those that stand in this arm's prompt, in their order.

        Args:
            ranking: indices of the item's documents, the retriever's best first.
            earlier: lines of the item's earlier arms by name.
        """
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
    ``full-again``: the whole prompt in another layout. ``full-in-order-of:METHOD``: the whole prompt in the order that
    a method which moves documents gave them.

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
        if len(options) != 1 or not options[0].isdecimal() or int(options[0]) < 1:
            raise InputError("methods", f"is written {FEWER}:K, K being at least 1", written)
        return Arm(written, full, keep=int(options[0]))
    if name == IN_ORDER_OF:
        of = written.partition(":")[2]
        if not find_method(of).reuses:
            raise InputError("methods", "full prefill keeps the given order", written)
        return Arm(written, full, order_of=of)
    return Arm(written, find_method(written))


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
