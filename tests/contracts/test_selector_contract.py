"""What every selector must do; it is enough that a method names it in `METHODS`."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger, Provenance
from kvquilt.placement import Placement, place_runs
from kvquilt.reading import Reader
from kvquilt.repair.everything import Everything
from kvquilt.repair.nothing import Nothing
from kvquilt.repair.presets import AUTO_ORDER, METHODS, find_method
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import tiny
from tests.oracle import close, full_prefill, runs_of, stock

SELECTORS = {type(m.selector).__name__: m.selector for m in METHODS.values()}
every = pytest.mark.parametrize("name", SELECTORS)
methods = pytest.mark.parametrize("name", METHODS)

shapes = st.lists(st.tuples(st.sampled_from("iABCD"), st.integers(1, 9)), min_size=1, max_size=9)


def placed(shape: list[tuple[str, int]], target: int | None = None) -> Placement:
    return place_runs(runs_of("".join(kind for kind, _ in shape), [length for _, length in shape]), target=target)


@every
@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 20))
def test_rows_are_ascending_disjoint_whole_documents(name: str, shape: list[tuple[str, int]], pick: int) -> None:
    count = sum(kind != "i" for kind, _ in shape)
    selector, placement = SELECTORS[name], placed(shape, pick % count if count else None)
    documents = placement.documents()
    rows = selector.select(placement)
    assert all(len(r) > 0 and r.step == 1 for r in rows)
    assert all(a.stop <= b.start for a, b in pairwise(rows))
    spans = [placement.span(i) for i in documents]
    assert all(r in spans for r in rows), "granularity is the document, and inline rows are not a selector's to choose"
    assert rows == selector.select(placement), "the same choice twice"


@every
def test_without_documents_nothing_is_selected(name: str) -> None:
    assert SELECTORS[name].select(placed([("i", 5)])) == []


@every
def test_a_selector_is_a_frozen_dataclass_that_declares_probe_and_granularity(name: str) -> None:
    selector = SELECTORS[name]
    assert dataclasses.is_dataclass(selector)
    assert selector.probe in ("none", "retriever")
    assert selector.granularity == "document"
    with pytest.raises(dataclasses.FrozenInstanceError):
        selector.probe = "none"  # type: ignore[misc]


def test_the_two_ends() -> None:
    placement = placed([("i", 3), ("A", 4), ("B", 2), ("i", 1)])
    assert Nothing().select(placement) == []
    assert Everything().select(placement) == [range(3, 7), range(7, 9)]


@methods
@settings(max_examples=8, deadline=None)
@given(shapes, st.integers(0, 20))
def test_rows_charged_are_rows_counted(name: str, shape: list[tuple[str, int]], pick: int) -> None:
    """T11: what the ledger charges for repair is what the hooks saw, in every layer."""
    method, model = METHODS[name], tiny()
    runs = place_runs(placed([*shape, ("i", 2)]).runs).runs
    held = [i for i, run in enumerate(runs) if run.document is not None]
    target = pick % len(held) if held and method.selector.probe == "retriever" else None
    placement = place_runs(runs, method.order, target)
    ledger = Ledger()
    reader = Reader(model, Store.open(None, 1 << 28), Isolated(), ())
    out, cache = reader.read(placement, method, None, ledger, 0)
    model.pool.release(cache)
    inline = sum(len(run.ids) for run in runs if run.document is None)
    assert ledger.tokens[Provenance.INLINE] == inline
    assert ledger.forward_tokens["read"] == inline + ledger.tokens[Provenance.RECOMPUTED]
    assert ledger.token_layers == 3 * (ledger.forward_tokens["read"] + ledger.forward_tokens["compile"])
    if not method.reuses:
        assert close(out, full_prefill(stock(), placement.ids)[-1:])


@methods
def test_a_method_is_found_by_its_name_and_describes_itself(name: str) -> None:
    method = find_method(name)
    assert method.name == name
    assert method.summary
    assert method.reuses == (name != "full")


def test_the_names_are_those_that_scripts_rely_on() -> None:
    assert {"full", "none", "retrieved-document"} <= set(METHODS)
    assert set(AUTO_ORDER) < set(METHODS)
    assert all(METHODS[name].reuses for name in AUTO_ORDER)
    with pytest.raises(InputError, match="did you mean 'none'"):
        find_method("non")
