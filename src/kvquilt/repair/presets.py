"""Methods by name: each is a row of parts, never a class of its own."""

from __future__ import annotations

from dataclasses import dataclass

from kvquilt.errors import InputError, nearest
from kvquilt.placement import Order
from kvquilt.repair.everything import Everything
from kvquilt.repair.nothing import Nothing
from kvquilt.repair.retrieved_document import RetrievedDocument
from kvquilt.repair.selector import Selector


@dataclass(frozen=True, slots=True)
class Method:
    """One preset: an order and a selector. `summary` is what the command line says about it."""

    name: str
    order: Order
    selector: Selector
    summary: str

    @property
    def reuses(self) -> bool:
        return not isinstance(self.selector, Everything)


METHODS = {
    m.name: m
    for m in (
        Method("full", Order.GIVEN, Everything(), "full prefill: the truth, no reuse"),
        Method("none", Order.GIVEN, Nothing(), "pure reuse: cheapest, changes answers"),
        Method(
            "retrieved-document",
            Order.TARGET_LAST,
            RetrievedDocument(),
            "the best-ranked document moves next to the question and is recomputed; the others are reused",
        ),
    )
}
AUTO_ORDER = ("retrieved-document", "none")  # what `auto` tries, first to last, before full prefill


def find_method(name: object) -> Method:
    """The preset `name`.

    Raises:
        InputError: unknown name, or no name at all; the message gives the nearest.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise InputError("method", f"unknown method {name!r}{nearest(name, [*METHODS, 'auto'])}")
    return METHODS[name]
