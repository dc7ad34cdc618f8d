"""EPIC: the first k tokens of every document but an exact one, shared fairly by a budget."""

from __future__ import annotations

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger, Provenance
from kvquilt.placement import place_runs
from kvquilt.reading import Reader
from kvquilt.repair.first_tokens import FirstTokens
from kvquilt.repair.presets import METHODS, find_method
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import tiny
from tests.oracle import close, full_prefill, random_ids, runs_of, stock
from tests.repair.scenes import scene_of, spans_of

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def test_documents_take_turns() -> None:
    scene = scene_of("iABCi", (2, 4, 1, 3, 2))
    assert FirstTokens(3).choose(scene).ranking.tolist() == [2, 6, 7, 3, 8, 4, 9]


def test_the_first_k_of_each_and_none_of_an_exact_one() -> None:
    scene = scene_of("iABCi", (2, 20, 5, 30, 2), exact=[1])
    ranking = FirstTokens(8).choose(scene).ranking.tolist()
    assert spans_of(scene, ranking) == [list(range(5)), list(range(8))]
    assert not set(range(2, 22)) & set(ranking)


def test_without_a_document_there_is_nothing() -> None:
    choice = FirstTokens().choose(scene_of("i", (5,)))
    assert choice.ranking.dtype == torch.int64
    assert not len(choice.ranking)


@pytest.mark.parametrize("family", FAMILIES)
def test_k_as_long_as_the_longest_document_is_full_prefill(family: str) -> None:
    placement = place_runs(runs_of("iABCi", (5, 30, 17, 40, 4)))
    reader = Reader(tiny(family), Store.open(None, 1 << 28), Isolated(), ())
    truth = full_prefill(stock(family), placement.ids)[-1:]
    for k, full in ((40, True), (39, False)):
        out, cache = reader.read(placement, find_method(f"epic:k={k}"), None, Ledger(), 0)
        reader.model.pool.release(cache)
        assert (float((out - truth).abs().max()) < 1e-4 * float(truth.abs().max())) == full


def test_the_preset_spends_what_its_documents_name_and_leaves_an_exact_one_alone() -> None:
    opening = random_ids(4, 77)
    runs = runs_of("iABCi", (4, 30, 20, 10, 3))
    placement = place_runs([type(runs[0])(opening), *runs[1:]])
    reader, ledger = Reader(tiny(), Store.open(None, 1 << 28), Isolated(opening), opening), Ledger()
    out, cache = reader.read(placement, METHODS["epic"], None, ledger, 0)
    reader.model.pool.release(cache)
    spent = ledger.spending
    assert spent is not None
    assert (spent.allowed, spent.rows, spent.probe, spent.repair) == (None, 26, 0, 26 * 3)
    assert [d.recomputed for d in ledger.documents] == [0, 16, 10]
    assert ledger.documents[0].provenance is Provenance.EXACT
    assert not close(out, full_prefill(stock(), placement.ids)[-1:])


def test_a_budget_cuts_all_documents_alike() -> None:
    placement = place_runs(runs_of("ABCi", (30, 20, 40, 3)))
    reader, ledger = Reader(tiny(), Store.open(None, 1 << 28), Isolated((9, 9)), ()), Ledger()
    _, cache = reader.read(placement, find_method("epic:k=1000,10%"), None, ledger, 0)
    reader.model.pool.release(cache)
    assert [d.recomputed for d in ledger.documents] == [3, 3, 3]


@pytest.mark.parametrize("k", [0, -1])
def test_no_tokens_is_no_method(k: int) -> None:
    with pytest.raises(InputError, match=f"k: must be at least 1 .got {k}"):
        find_method(f"epic:k={k}")
