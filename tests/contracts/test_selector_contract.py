"""What every selector and every method must do; it is enough that a method names it in `METHODS`."""

from __future__ import annotations

import dataclasses
import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger, Provenance
from kvquilt.placement import Placement, place_runs
from kvquilt.reading import Reader
from kvquilt.repair.budget import Budget
from kvquilt.repair.everything import Everything
from kvquilt.repair.nothing import Nothing
from kvquilt.repair.operator import assemble
from kvquilt.repair.presets import AUTO_ORDER, METHODS, Method, find_method
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import tiny
from tests.oracle import close, full_prefill, runs_of, stock
from tests.repair.methods import WHOLE, ids_in_order
from tests.writers.trained import random_writers

SELECTORS = {name: m.selector for name, m in METHODS.items()}
every = pytest.mark.parametrize("name", SELECTORS)
methods = pytest.mark.parametrize("name", METHODS)
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
families = pytest.mark.parametrize("family", FAMILIES)

shapes = st.lists(st.tuples(st.sampled_from("iABCD"), st.integers(1, 9)), min_size=1, max_size=7)


def placed(shape: list[tuple[str, int]], method: Method, pick: int = 0) -> Placement:
    """The shape with a question behind it, in the method's order."""
    runs = runs_of("".join(kind for kind, _ in shape) + "i", [*(length for _, length in shape), 2])
    held = sum(run.document is not None for run in runs)
    ranking = [(pick + n) % held for n in range(held)] if method.needs_ranking else []
    return place_runs(runs, method.order, ranking, method.moved)


def reader_of(family: str = "llama") -> Reader:
    model, store = tiny(family), Store.open(None, 1 << 28)
    return Reader(model, store, Isolated(), (), helper=tiny(family, 1), trained=random_writers(model))


def read(
    placement: Placement, method: Method, family: str = "llama", reader: Reader | None = None, logits: int = 1
) -> tuple[torch.Tensor, Ledger]:
    reader, ledger = reader or reader_of(family), Ledger()
    out, cache = reader.read(placement, affordable(placement, method, reader), None, ledger, 0, logits)
    reader.model.pool.release(cache)
    return out, ledger


def affordable(placement: Placement, method: Method, reader: Reader) -> Method:
    """The method; where its budget cannot pay for the probe, since prompts here are tiny, twice what the error asks."""
    with suppress(InputError):
        reader.check(placement, method)
        return method
    with pytest.raises(InputError, match=r"the least possible is \d+") as raised:
        reader.check(placement, method)
    least = int(re.findall(r"the least possible is (\d+)", str(raised.value))[0])
    reader.check(placement, dataclasses.replace(method, budget=Budget(token_layers=least)))
    return dataclasses.replace(method, budget=Budget(token_layers=2 * least))


@every
@settings(max_examples=15, deadline=None)
@given(shapes, st.integers(0, 20))
def test_a_ranking_holds_spendable_rows_at_most_once(name: str, shape: list[tuple[str, int]], pick: int) -> None:
    method, model = METHODS[name], tiny()
    placement = placed(shape, method, pick)
    documents = placement.documents()
    inline = [placement.span(i) for i, run in enumerate(placement.runs) if run.document is None]
    segments = {documents[n]: s for n, s in Isolated().compile(model, [placement.runs[i].ids for i in documents])}
    if method.writer or method.selector.probe is Probe.OFFLINE:
        pytest.skip("needs segments of its own writer; the method tests below cover it")

    def chosen() -> tuple[Scene, Choice]:  # a probe may leave fresh keys in the slots, so each has slots of its own
        cache = assemble(model, placement, segments, placement.tokens)
        try:
            scene = Scene(model, placement, documents[1:], inline, segments, cache, helper=tiny(seed=1))
            return scene, method.selector.choose(scene)
        finally:
            model.pool.release(cache)

    (scene, choice), (_, again) = chosen(), chosen()
    assert choice.ranking.dtype == torch.int64
    assert len(set(choice.ranking.tolist())) == len(choice.ranking)
    assert set(choice.ranking.tolist()) <= set(scene.slots.tolist()), "an exact document's rows are not spent on"
    assert torch.equal(choice.ranking, again.ranking), "the same choice twice"


@every
def test_a_selector_is_a_frozen_dataclass_that_declares_probe_and_granularity(name: str) -> None:
    selector = SELECTORS[name]
    assert dataclasses.is_dataclass(selector)
    assert selector.probe in Probe
    assert selector.granularity in Granularity
    with pytest.raises(dataclasses.FrozenInstanceError):
        selector.probe = Probe.NONE  # type: ignore[misc]


def test_the_two_ends() -> None:
    placement = place_runs(runs_of("iABi", (3, 4, 2, 1)))
    scene = Scene(tiny(), placement, [1, 2], [range(3), range(9, 10)])
    assert Nothing().choose(scene).ranking.tolist() == []
    assert Everything().choose(scene).ranking.tolist() == list(range(3, 9))


@methods
@settings(max_examples=8, deadline=None)
@given(shapes, st.integers(0, 20))
def test_what_is_charged_was_counted_and_fits_the_budget(name: str, shape: list[tuple[str, int]], pick: int) -> None:
    """T11 by the ledger's own word on any shape; hooks of the tests' own count in `tests/repair/test_spending.py`."""
    method, reader = METHODS[name], reader_of()
    placement = placed(shape, method, pick)
    out, ledger = read(placement, method, reader=reader)
    inline = sum(len(run.ids) for run in placement.runs if run.document is None)
    assert ledger.tokens[Provenance.INLINE] == inline
    assert sum(ledger.tokens.values()) == placement.tokens
    assert bool(torch.isfinite(out).all())
    if not method.reuses:
        assert close(out, full_prefill(stock(), placement.ids)[-1:])
        assert ledger.spending is None
        return
    spent = ledger.spending
    assert spent is not None
    assert spent.probe >= 0
    assert spent.repair >= 0
    if spent.allowed is not None:
        assert spent.charged <= spent.allowed
    if spent.rows == 0 and method.selector.probe.is_blind:
        assert spent.charged == 0


@methods
@families
def test_all_rows_equal_full_prefill(name: str, family: str) -> None:
    method = METHODS[name]
    if isinstance(method.selector, Nothing):
        pytest.skip("it never computes a document row")
    placement = placed([("i", 5), ("A", 30), ("B", 17), ("C", 40)], method)
    everything = dataclasses.replace(method, budget=Budget(token_layers=10**9))
    if name in WHOLE:
        everything = find_method(f"{name}:{WHOLE[name]}")
        placement = placed([("i", 5), ("A", 30), ("B", 17), ("C", 40)], everything)
    reader, ledger = reader_of(family), Ledger()
    out, cache = reader.read(placement, everything, None, ledger, 0)
    reader.model.pool.release(cache)
    ids = placement.ids if not ledger.documents else ids_in_order(placement, ledger)
    assert close(out, full_prefill(stock(family), ids)[-1:])


@methods
def test_the_same_prompt_three_times(name: str) -> None:
    """Stored bytes and answers are the same from the second time on, and nothing more is compiled."""
    method, reader = METHODS[name], reader_of()
    placement = placed([("i", 3), ("A", 9), ("B", 6), ("A", 9)], method)
    runs = [read(placement, method, reader=reader) for _ in range(3)]
    assert torch.equal(runs[1][0], runs[2][0])
    assert runs[1][1].forward_tokens["compile"] == 0
    assert runs[1][1].spending == runs[2][1].spending


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
