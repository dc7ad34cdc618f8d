"""The paths of a pass, contiguous or gathered, in one block or many, give the same; a wrong mask in any is caught."""

from __future__ import annotations

import pytest
import torch

from kvquilt.model.rows import Block, RowPlan, Rows
from kvquilt.placement import place_runs
from kvquilt.repair.presets import find_method
from kvquilt.repair.scene import joined
from tests.models import FAMILIES as ALL
from tests.models import tiny
from tests.oracle import close, full_prefill, runs_of, stock
from tests.repair.methods import read, reader_of
from tests.repair.passes import FAMILIES, passed, same_slots, with_rows
from tests.repair.tokenwise import Slots
from tests.test_attention import bottom_right

PLACEMENT = place_runs(runs_of("iABi", (3, 17, 15, 4)))
families = pytest.mark.parametrize("family", FAMILIES)


class Gathered(Rows):
    """Rows that are always gathered and always masked, in blocks of their own."""

    @property
    def index(self) -> slice | torch.Tensor:
        return self.slots

    @property
    def is_prefill(self) -> bool:
        return False


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("first", [0, 3, 20, 35])
def test_the_contiguous_path_equals_the_gathered_one(family: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From all rows (no mask) to the question alone: a slice and a gather give the same."""
    plan = [range(3), range(first, PLACEMENT.tokens)] if first > 3 else [range(PLACEMENT.tokens)]
    plans: list[list[range]] = [plan[:1], plan[1:]] if first > 3 else [plan]
    fast, slots = passed(tiny(family), PLACEMENT, plans, 4)
    assert isinstance(RowPlan(joined(plans[-1]), PLACEMENT.tokens).current.index, slice)
    monkeypatch.setattr("kvquilt.model.rows.Rows", Gathered)
    assert isinstance(RowPlan(joined(plans[-1]), PLACEMENT.tokens).current.index, torch.Tensor)
    slow, after = passed(tiny(family), PLACEMENT, plans, 4)
    assert close(slow, fast)
    assert same_slots(after, slots)


# T8, and blocks of scattered rows

LONG = place_runs(runs_of("iABCi", (5, 150, 140, 160, 5)))
SCATTERED = joined([range(6, 290, 1), range(300, 450, 2)])  # three blocks of 128 and a part


def long_pass(family: str, last: str = "C") -> tuple[torch.Tensor, Slots]:
    opening, a, b, c, question = LONG.runs
    other = runs_of(last, (160,))[0]
    placement = place_runs([opening, a, b, c if last == "C" else other, question])
    return passed(tiny(family), placement, [with_rows(placement, SCATTERED)], 5)


def blocks_are_right(family: str) -> bool:
    """Rows that were all computed once before: some of them again, in blocks of scattered ones, change nothing."""
    plans = [[range(LONG.tokens)], with_rows(LONG, SCATTERED)]
    out, _ = passed(tiny(family), LONG, plans, 5)
    return close(out, full_prefill(stock(family), LONG.ids)[-5:])


def canary_lives(family: str) -> bool:
    """Rows before document C stay bitwise the same when it becomes another one of equal length."""
    (one, before), (two, after) = long_pass(family), long_pass(family, "D")
    assert not torch.equal(one, two)
    early = LONG.span(3).start
    return all(
        torch.equal(x[:, :early], y[:, :early])
        for p, q in zip(before, after, strict=True) for x, y in zip(p, q, strict=True)
    )  # fmt: skip


@families
def test_scattered_rows_in_several_blocks(family: str) -> None:
    assert blocks_are_right(family)
    assert canary_lives(family)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("from_block", [0, 1, 2])
def test_a_bottom_right_mask_in_any_block_is_caught(
    family: str, from_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in one block of 128 scattered rows only: both tests above fail."""
    real = Rows._block

    def block(
        self: Rows, first: int, last: int, layer: int | None, window: int | None, group: int, like: torch.Tensor
    ) -> Block:
        wrong = first == 128 * from_block and isinstance(self.index, torch.Tensor)
        return (bottom_right if wrong else real)(self, first, last, layer, window, group, like)

    monkeypatch.setattr(Rows, "_block", block)
    assert not blocks_are_right(family)
    assert not canary_lives(family)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "method", ["random:70%", "cacheblend:1000000", "cacheblend-gradual:80%", "spread:40%", "droidspeak"]
)
def test_rows_in_portions_give_the_same(monkeypatch: pytest.MonkeyPatch, family: str, method: str) -> None:
    """Many rows run a portion at a time, for memory's sake; what comes out, and what is charged, stays the same."""
    placement = place_runs(runs_of("iABCi", (5, 40, 31, 27, 6)))
    whole, whole_ledger = read(reader_of(family), placement, find_method(method))
    monkeypatch.setattr("kvquilt.model.language_model.PORTION_ROWS", 7)
    parts, parts_ledger = read(reader_of(family), placement, find_method(method))
    assert close(parts, whole)
    assert parts_ledger.spending == whole_ledger.spending
    assert parts_ledger.flops == pytest.approx(whole_ledger.flops, rel=0.01)
