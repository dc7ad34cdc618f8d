"""What a choice and a correction both want of one pass, and what cannot be had together."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger
from kvquilt.model.rows import RowPlan, Watcher, Watchers
from kvquilt.placement import Order, place_runs
from kvquilt.prompt import Document, Prompt
from kvquilt.reading import Reader
from kvquilt.repair.plan import row_plan
from kvquilt.repair.presets import METHODS, find_method
from kvquilt.repair.selector import Choice
from kvquilt.store import Store
from kvquilt.writers.encoder import ENCODER
from kvquilt.writers.isolated import Isolated
from tests.models import tiny
from tests.oracle import close, full_prefill, runs_of, stock
from tests.repair.methods import read, reader_of, within, wrapped
from tests.tokenizers import chatml_tokenizer


class Notes(Watcher):
    def __init__(self, name: str, heard: list[str]) -> None:
        self._name, self._heard = name, heard

    def enters(self, layer: int, plan: RowPlan, hidden: torch.Tensor) -> None:
        self._heard.append(self._name)


def test_a_choice_that_watches_does_not_silence_a_correction() -> None:
    heard: list[str] = []
    choice = Choice(torch.arange(4), decline=0.5, narrow=lambda counts: Notes("choice", heard))
    plan = row_plan(torch.tensor([4]), 3, choice, torch.arange(2), 5, None, Notes("correction", heard))
    assert isinstance(plan.watcher, Watchers)
    plan.watcher.enters(0, plan, torch.empty(1, 5, 8))
    assert heard == ["correction", "choice"]


def test_rows_that_become_fewer_are_not_reshaped() -> None:
    placement = place_runs(runs_of("iABi", (3, 40, 30, 3)))
    reader = Reader(tiny(), Store.open(None, 1 << 28), Isolated(), ())
    lent = reader.model.pool.lent
    method = find_method("cacheblend-gradual:100%,expand=2")
    with pytest.raises(InputError, match="post: rows that become fewer"):
        reader.read(placement, method, None, Ledger(), 0)
    assert reader.model.pool.lent == lent


# link tokens refuse it: they stand between documents, which then cannot share positions; an encoder's have none
@pytest.mark.parametrize(
    "name", [n for n, m in METHODS.items() if m.order is Order.GIVEN and n not in ("link-tokens", ENCODER)]
)
def test_an_order_found_by_density_ends_with_every_token_at_its_own_position(name: str) -> None:
    """Whatever the selector looks at: the frames in which documents were scored are no prompt to answer from."""
    placement, reader = place_runs(runs_of("iABCi", (3, 20, 17, 12, 4))), reader_of()
    method = within(METHODS[name], token_layers=10**6) if METHODS[name].budget is not None else METHODS[name]
    method, ledger = dataclasses.replace(method, order=Order.DENSITY_ASCENDING), Ledger()
    out, cache = reader.read(placement, method, None, ledger, 0)
    slots = wrapped(reader, placement, method).tokens
    dropped = slots - cache.filled
    try:
        assert cache.next_position == slots
        assert dropped == 0 or name == "samkv"
    finally:
        reader.model.pool.release(cache)
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("written", ["spread:1000000", "epic:k=99", "random:1000000", "full", "droidspeak:last=3"])
def test_everything_in_an_order_found_by_density_is_full_prefill(written: str) -> None:
    placement, reader = place_runs(runs_of("iABCi", (3, 20, 17, 12, 4))), reader_of()
    method = dataclasses.replace(find_method(written), order=Order.DENSITY_ASCENDING)
    assert close(read(reader, placement, method)[0], full_prefill(stock(), placement.ids)[-1:])


def test_nothing_in_an_order_found_by_density_is_reuse_in_the_given_one() -> None:
    placement, reader = place_runs(runs_of("iABCi", (3, 20, 17, 12, 4))), reader_of()
    method = dataclasses.replace(find_method("none"), order=Order.DENSITY_ASCENDING)
    assert torch.equal(read(reader, placement, method)[0], read(reader, placement, find_method("none"))[0])


@pytest.mark.parametrize("option", ["samkv:block", "samkv:initial", "samkv:local", "cacheclip:group", "epic:k"])
def test_a_number_beyond_the_longest_document_is_all_of_it(option: str) -> None:
    placement, reader = place_runs(runs_of("iABi", (3, 20, 17, 4))), reader_of()
    if option.startswith("cacheclip"):
        parts = ["Read.", Document("The quick brown fox", id="a"), Document("the lazy dog", id="b"), "Who?"]
        placement = place_runs(Prompt(parts).runs(chatml_tokenizer()))
    budget = "" if option.startswith("epic") else ",100%"
    huge, all_of_it = (find_method(f"{option}={n}{budget}") for n in (10**30, 40))
    assert torch.equal(read(reader, placement, huge)[0], read(reader, placement, all_of_it)[0])
