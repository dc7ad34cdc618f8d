"""What a choice and a correction both want of one pass, and what cannot be had together."""

from __future__ import annotations

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger
from kvquilt.model.rows import RowPlan, Watcher, Watchers
from kvquilt.placement import place_runs
from kvquilt.reading import Reader
from kvquilt.repair.plan import row_plan
from kvquilt.repair.presets import find_method
from kvquilt.repair.selector import Choice
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import tiny
from tests.oracle import runs_of


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
