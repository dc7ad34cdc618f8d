"""Masks go by slot: a gathered early row never sees what stands behind it, and windows cut in positions."""

from __future__ import annotations

import math

import pytest
import torch

from kvquilt.model import attention
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import FOLDED_ROWS, Block, RowPlan, Rows, active
from kvquilt.placement import Placement, place_runs
from kvquilt.repair.operator import assemble, repair
from kvquilt.writers.isolated import Isolated
from tests.models import FAMILIES, tiny
from tests.oracle import close, full_prefill, random_ids, runs_of, stock

pytestmark = pytest.mark.usefixtures("nan_slots")
families = pytest.mark.parametrize("family", FAMILIES)


def repaired(model: LanguageModel, placement: Placement, rows: list[range], logits: int = 1) -> torch.Tensor:
    """Keys of the whole cache after placing every document and computing `rows`: ``[layers, heads, tokens, dim]``."""
    at = placement.documents()
    segments = {at[n]: s for n, s in Isolated().compile(model, [placement.runs[i].ids for i in at])}
    cache = assemble(model, placement, segments, placement.tokens)
    try:
        repair(model, cache, placement.ids, rows, logits)
        return cache.slot_keys[:, 0, :, : placement.tokens].clone()
    finally:
        model.pool.release(cache)


def bottom_right(
    self: Rows, first: int, last: int, layer: int | None, window: int | None, group: int, like: torch.Tensor
) -> Block:
    """The classic bug: gathered rows are taken for the last ones."""
    rows, filled = self.slots[first:last], self.plan.filled
    as_if = torch.arange(filled - len(rows), filled)
    hidden = torch.arange(filled) > as_if[:, None]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(like.dtype).min)
    return Block(first, first + len(rows), 0, filled, mask.repeat(group, 1) if len(rows) <= FOLDED_ROWS else mask)


def canary_holds(family: str) -> bool:
    """Whether selected rows of document A stay bitwise the same when document C becomes another of equal length."""
    opening, a, b, c, question = runs_of("iABCi", (4, 12, 9, 20, 5))
    other = runs_of("D", (20,))[0]
    rows = [range(4), range(6, 9), range(11, 14), range(45, 50)]
    model = tiny(family)
    one = repaired(model, place_runs([opening, a, b, c, question]), rows)
    two = repaired(model, place_runs([opening, a, b, other, question]), rows)
    assert not torch.equal(one[:, :, 25:45], two[:, :, 25:45])
    return torch.equal(one[:, :, :25], two[:, :, :25])


def gathered_equals_full(family: str) -> bool:
    placement = place_runs(runs_of("iABi", (4, 12, 9, 5)))
    model, n = tiny(family), placement.tokens
    cache = model.pool.acquire(n)
    try:
        repair(model, cache, placement.ids, [range(n)])
        rows = [range(1, 7), range(12, 16), range(20, n)]
        return close(repair(model, cache, placement.ids, rows), full_prefill(stock(family), placement.ids)[-1:])
    finally:
        model.pool.release(cache)


@families
def test_an_early_row_never_sees_a_later_document(family: str) -> None:
    assert canary_holds(family)
    assert gathered_equals_full(family)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_bottom_right_mask_is_caught(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The two tests above are worth something: with the classic bug planted both fail."""
    monkeypatch.setattr(Rows, "_block", bottom_right)
    assert not canary_holds(family)
    assert not gathered_equals_full(family)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_more_rows_than_one_block_equal_full_prefill(family: str) -> None:
    ids = random_ids(600, 8)
    model = tiny(family)
    cache = model.pool.acquire(600)
    try:
        repair(model, cache, ids, [range(600)], 0)
        out = repair(model, cache, ids, [range(3, 290), range(300, 600)], 300)
    finally:
        model.pool.release(cache)
    assert close(out, full_prefill(stock(family), ids)[300:])


@pytest.mark.parametrize("window", [None, 1, 5, 24, 100])
@pytest.mark.parametrize("rows", [[0], [41], [0, 1, 2], [3, 4, 17, 40, 41], list(range(1, 42))], ids=str)
def test_attention_equals_its_definition(window: int | None, rows: list[int]) -> None:
    """Grouped heads, any rows, any window: the same numbers as a softmax written out in fp64."""
    generator = torch.Generator().manual_seed(1)
    filled, heads, groups, dim = 42, 4, 2, 8
    q = torch.randn(1, heads, len(rows), dim, generator=generator)
    k, v = (torch.randn(1, groups, filled, dim, generator=generator) for _ in range(2))
    with active(RowPlan(torch.tensor(rows), filled)):
        out, _ = attention.attend(torch.nn.Module(), q, k, v, None, 0.3, window)
    keys, values = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
    scores = q.double() @ keys.transpose(-1, -2) * 0.3
    slots = torch.arange(filled)
    at = torch.tensor(rows)[:, None]
    visible = (slots <= at) & (slots > at - (window or math.inf))
    truth = scores.masked_fill(~visible, -math.inf).softmax(-1) @ values
    assert torch.allclose(out.double(), truth.transpose(1, 2), atol=1e-5)


def test_slots_behind_the_filled_ones_are_never_read() -> None:
    model = tiny("mistral-window")
    ids = random_ids(40, 4)
    cache = model.pool.acquire(40 + 500)  # NaN behind the prompt
    try:
        out = repair(model, cache, ids, [range(40)], 40)
        assert bool(torch.isnan(cache.slot_keys[:, :, :, 40:]).all())
    finally:
        model.pool.release(cache)
    assert close(out, full_prefill(stock("mistral-window"), ids))


def test_without_a_plan_the_wrapped_model_is_the_stock_model() -> None:
    """Taking a model over must not change what its owner does with it."""
    ids = random_ids(50, 5)
    for family in ("llama", "gemma3"):
        assert close(full_prefill(tiny(family).hf, ids), full_prefill(stock(family), ids), 1e-5)
