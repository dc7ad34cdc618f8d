"""Layer bands against a stock model that takes one token at a time, and what they need of stored segments."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger
from kvquilt.placement import place_runs
from kvquilt.reading import Reader
from kvquilt.repair.budget import Budget
from kvquilt.repair.layer_band import LayerBand
from kvquilt.repair.presets import METHODS, Method, find_method
from kvquilt.repair.selector import Probe
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.residual import Residual
from tests.models import tiny
from tests.oracle import close, full_prefill, pure_reuse, random_ids, runs_of, stock
from tests.repair.passes import FAMILIES
from tests.repair.scenes import scene_of
from tests.repair.tokenwise import stored, walk
from tests.writers.eager import hidden_states

LAYERS = 3
PLACEMENT = place_runs(runs_of("iABi", (3, 17, 15, 4)))  # longer than gemma3's window of 24
families = pytest.mark.parametrize("family", FAMILIES)


def read(method: Method, family: str = "llama", writer: Isolated | None = None) -> tuple[torch.Tensor, Ledger]:
    reader, ledger = Reader(tiny(family), Store.open(None, 1 << 28), writer or Isolated(), ()), Ledger()
    lent = reader.model.pool.lent
    try:
        out, cache = reader.read(PLACEMENT, method, None, ledger, 0)
    except BaseException:
        assert reader.model.pool.lent == lent, "a failure gives the slots back"
        raise
    reader.model.pool.release(cache)
    return out, ledger


def banded(first: int, last: int) -> torch.Tensor:
    """``[layers, tokens]`` bool: inline rows everywhere, document rows in the band."""
    out = torch.zeros(LAYERS, PLACEMENT.tokens, dtype=torch.bool)
    out[first:last] = True
    for i, run in enumerate(PLACEMENT.runs):
        if run.document is None:
            span = PLACEMENT.span(i)
            out[:, span.start : span.stop] = True
    return out


@families
@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_band_from_the_first_layer_on(family: str, last: int) -> None:
    truth, _ = walk(stock(family), PLACEMENT.ids, stored(stock(family), PLACEMENT), banded(0, last))
    out, ledger = read(find_method(f"droidspeak:last={last}"), family)
    assert close(out, truth[PLACEMENT.tokens - 1][None])
    assert ledger.spending is not None
    assert (ledger.spending.rows, ledger.spending.repair, ledger.spending.probe) == (32, 32 * last, 0)
    assert close(out, full_prefill(stock(family), PLACEMENT.ids)[-1:]) == (last == LAYERS)
    # keys and values of layer 0 are those of pure reuse already
    assert close(out, pure_reuse(stock(family), PLACEMENT)[-1:]) == (last == 1)


@families
@pytest.mark.parametrize(("first", "last"), [(1, 2), (1, 3), (2, 3)])
@pytest.mark.parametrize("prefix", [(), random_ids(5, 9)], ids=["alone", "behind"])
def test_a_deeper_band_starts_from_what_the_writer_noted(
    family: str, first: int, last: int, prefix: tuple[int, ...]
) -> None:
    states = {}
    for i in PLACEMENT.documents():
        entering = hidden_states(family, (*prefix, *PLACEMENT.runs[i].ids))[first][len(prefix) :]
        states |= dict(zip(PLACEMENT.span(i), entering, strict=True))
    computed = banded(first, last)
    truth, _ = walk(
        stock(family), PLACEMENT.ids, stored(stock(family), PLACEMENT, prefix), computed, entering=(first, states)
    )
    writer = Isolated(prefix, (Residual(first),))
    out, ledger = read(find_method(f"droidspeak:first={first},last={last}"), family, writer)
    assert close(out, truth[PLACEMENT.tokens - 1][None])
    spent = ledger.spending
    assert spent is not None
    assert (spent.rows, spent.repair, spent.probe) == (32, 32 * (last - first), 0), "layers before it cost nothing"


def test_a_budget_keeps_the_first_rows() -> None:
    method = dataclasses.replace(find_method("droidspeak:first=1,last=3"), budget=Budget(token_layers=41))
    _, ledger = read(method, writer=Isolated(extras=(Residual(1),)))
    assert ledger.spending is not None
    assert (ledger.spending.rows, ledger.spending.charged) == (20, 40)
    assert [d.recomputed for d in ledger.documents] == [17, 3]


def test_by_default_the_shallower_half_of_the_model() -> None:
    scene = scene_of("iAi", (2, 5, 1))
    choice = METHODS["droidspeak"].selector.choose(scene)
    assert (choice.first, choice.last, choice.entering) == (0, 2, None)
    assert choice.ranking.tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("writer", [Isolated(), Isolated(extras=(Residual(2),))], ids=["nothing", "another layer"])
def test_a_segment_without_the_states_is_named(writer: Isolated) -> None:
    with pytest.raises(InputError, match=r"writer: .*layer 1 .*residual-1"):
        read(find_method("droidspeak:first=1,last=3"), writer=writer)


def test_a_band_that_is_none() -> None:
    with pytest.raises(InputError, match=r"last: must lie behind the band's first layer, 2 .got 1"):
        LayerBand(2, 1)
    with pytest.raises(InputError, match="first: "):
        LayerBand(-1)
    with pytest.raises(InputError, match=r"last: .*0:4 .*3 layers"):
        LayerBand(0, 4).choose(scene_of("Ai", (3, 1)))
    with pytest.raises(InputError, match=r"last: .*2:2 .*3 layers"):  # half of three layers is two
        LayerBand(2).choose(scene_of("Ai", (3, 1)))


def test_it_can_choose_blindly_only_where_it_needs_nothing_stored() -> None:
    assert LayerBand().probe is Probe.NONE
    assert LayerBand(1, 3).probe is Probe.OFFLINE
    assert dataclasses.replace(LayerBand(), first=1, last=2).probe is Probe.OFFLINE


@pytest.mark.parametrize("first", [0, 1])
def test_without_a_document_there_is_nothing(first: int) -> None:
    placement = place_runs(runs_of("i", (5,)))
    reader = Reader(tiny(), Store.open(None, 1 << 28), Isolated(), ())
    out, cache = reader.read(placement, find_method(f"droidspeak:last=3,first={first}"), None, Ledger(), 0)
    reader.model.pool.release(cache)
    assert close(out, full_prefill(stock(), placement.ids)[-1:])


@pytest.mark.parametrize("logits", [1, 4, 40])
@pytest.mark.parametrize(("first", "last"), [(1, 2), (1, 3), (2, 3)])
def test_the_rows_that_answer_pass_every_layer_where_a_document_ends_the_prompt(
    first: int, last: int, logits: int
) -> None:
    """They are computed in any case: what is stored of them is no start, and nothing is charged for them."""
    placement, writer = place_runs(runs_of("iAB", (3, 17, 15))), Isolated((), (Residual(first),))
    reader, ledger = Reader(tiny(), Store.open(None, 1 << 28), writer, ()), Ledger()
    method = find_method(f"droidspeak:first={first},last={last}")
    out, cache = reader.read(placement, method, None, ledger, 0, logits)
    reader.model.pool.release(cache)
    answering = min(logits, placement.tokens)
    assert ledger.spending is not None
    assert ledger.spending.probe == 0
    old = max(0, 17 + 15 - answering)
    assert ledger.spending.charged == old * (last - first)
    if old == 0:
        assert close(out, full_prefill(stock(), placement.ids)[-logits:])
