"""Slots that are not seen, were dropped, or share positions: masks go by slot, windows and angles by position."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvquilt.model.rows import Block, Rows, SlotView
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Order, place_runs
from kvquilt.repair.operator import compact, repair
from kvquilt.repair.scene import joined
from tests.models import tiny
from tests.oracle import close, random_ids, runs_of, stock
from tests.repair.passes import FAMILIES, computed, document_slots, inline_spans, passed, placed, plan_of, same_slots
from tests.repair.tokenwise import stored, walk

LAYERS = 3
PLACEMENT = place_runs(runs_of("iABi", (3, 17, 15, 4)))
SHARED = place_runs(runs_of("iABCi", (3, 20, 9, 14, 4), seed=1), Order.SHARED_POSITIONS)
families = pytest.mark.parametrize("family", FAMILIES)
few = settings(max_examples=8, deadline=None)
chosen = st.sets(st.integers(0, 31))  # of 32 document slots


@families
@few
@given(chosen, st.tuples(chosen, chosen, chosen))
def test_slots_out_of_sight_are_as_if_they_were_not_there(
    family: str, those: set[int], out_of_sight: tuple[set[int], ...]
) -> None:
    """By layer; a row out of sight still sees itself."""
    rows = computed(PLACEMENT, [those] * LAYERS)
    visible = torch.ones(LAYERS, PLACEMENT.tokens, dtype=torch.bool)
    slots = document_slots(PLACEMENT)
    for layer, hidden in enumerate(out_of_sight):
        visible[layer, slots[sorted(hidden)]] = False
    before = stored(stock(family), PLACEMENT)
    truth, after = walk(stock(family), PLACEMENT.ids, before, rows, visible=visible)
    out, ours = passed(tiny(family), PLACEMENT, [plan_of(rows, visible=visible)], len(truth))
    assert close(out, torch.stack(list(truth.values())))
    assert same_slots(ours, after)


def test_one_visibility_for_all_layers_is_that_of_each() -> None:
    rows = computed(PLACEMENT, [set(range(6, 14))] * LAYERS)
    visible = torch.arange(PLACEMENT.tokens) % 3 > 0
    one, _ = passed(tiny(), PLACEMENT, [plan_of(rows, visible=visible)])
    each, _ = passed(tiny(), PLACEMENT, [plan_of(rows, visible=visible.expand(LAYERS, -1))])
    assert torch.equal(one, each)


def shares_positions(family: str) -> bool:
    """Whether a question behind documents that share positions equals the walk at those positions."""
    view = SHARED.view()
    assert view is not None
    where = view.at(torch.arange(SHARED.tokens)).tolist()
    assert len(set(where)) < len(where)
    rows = computed(SHARED, [set()] * LAYERS)
    truth, _ = walk(stock(family), SHARED.ids, stored(stock(family), SHARED), rows, positions=where)
    out, _ = passed(tiny(family), SHARED, [plan_of(rows, view=view)], 4)
    return close(out, torch.stack(list(truth.values()))[-4:])


def drops_tokens(family: str, kept: set[int], more: int = 3) -> bool:
    """Whether the kept document slots alone, a question and then `more` tokens equal the walk at their positions."""
    slots = torch.cat((joined(inline_spans(PLACEMENT)), document_slots(PLACEMENT)[sorted(kept)])).sort().values
    model, following, end = tiny(family), random_ids(more, 11), PLACEMENT.tokens
    ids = [*(PLACEMENT.ids[i] for i in slots.tolist()), *following]
    where = [*slots.tolist(), *range(end, end + more)]
    cache = compact(model, placed(model, PLACEMENT), slots, len(ids))
    try:
        inline = torch.isin(slots, joined(inline_spans(PLACEMENT)))
        parts = [repair(model, cache, ids[: len(slots)], plan_of(inline[None], view=cache.view), int(inline.sum()))]
        assert (cache.filled, cache.next_position) == (len(slots), end), "two numbers with two names"
        for token in following:
            parts.append(model.forward(torch.tensor([[token]]), cache.tail(1), cache)[0])
        assert (cache.filled, cache.next_position) == (len(ids), end + more)
    finally:
        model.pool.release(cache)
    before = [
        tuple(torch.cat((x[:, slots], x.new_zeros(x.shape[0], more, x.shape[2])), 1) for x in pair)
        for pair in stored(stock(family), PLACEMENT)
    ]
    rows = torch.cat((inline, torch.ones(more, dtype=torch.bool))).expand(LAYERS, -1)
    truth, _ = walk(stock(family), ids, [(k, v) for k, v in before], rows, positions=where)
    return close(torch.cat(parts), torch.stack(list(truth.values())))


@families
def test_shared_positions_equal_the_walk_at_those_positions(family: str) -> None:
    assert shares_positions(family)


@families
@few
@example(set())
@example({31})
@given(chosen)
def test_dropped_tokens_equal_a_cache_of_the_kept_ones_at_their_positions(family: str, kept: set[int]) -> None:
    """Case 8: positions go on behind the last logical one, whatever was dropped."""
    assert drops_tokens(family, kept)


def planted(wrong: Callable[[SlotView], SlotView | None]) -> Callable[..., Block]:
    """`Rows._block` with another view while it builds a mask."""
    real = Rows._block

    def block(
        self: Rows, first: int, last: int, layer: int | None, window: int | None, group: int, like: torch.Tensor
    ) -> Block:
        right = self.plan.view
        self.plan.view = None if right is None else wrong(right)
        try:
            return real(self, first, last, layer, window, group, like)
        finally:
            self.plan.view = right

    return block


def test_a_window_that_goes_by_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared positions bring slots nearer, dropped tokens move them apart; only gemma3 has windows to get wrong."""
    monkeypatch.setattr(Rows, "_block", planted(lambda view: None))
    kept = {*range(4), *range(28, 32)}
    assert shares_positions("llama")
    assert drops_tokens("llama", kept)
    assert not shares_positions("gemma3")
    assert not drops_tokens("gemma3", kept)


def test_a_window_that_is_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rows._block

    def block(
        self: Rows, first: int, last: int, layer: int | None, window: int | None, group: int, like: torch.Tensor
    ) -> Block:
        return real(self, first, last, layer, None if window is None else window + 1, group, like)

    monkeypatch.setattr(Rows, "_block", block)
    assert not shares_positions("gemma3")
    assert not drops_tokens("gemma3", set(range(32)))


@families
def test_positions_that_are_shifted_by_one_are_caught(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A follow-up that continues at the number of slots, or one too far, is another prompt."""
    kept = {*range(4), *range(28, 32)}
    real = SlotCache.tail

    def shifted(self: SlotCache, count: int) -> object:
        plan = real(self, count)
        assert plan.view is not None
        plan.view = SlotView(plan.view.positions[: self.filled], plan.view.shift + 1)
        return plan

    monkeypatch.setattr(SlotCache, "tail", shifted)
    with pytest.raises(AssertionError, match="assert"):
        drops_tokens(family, kept)
