"""Weights after the softmax: those by which the attention over slots has mixed the values."""

from __future__ import annotations

import pytest
import torch

from kvquilt.model import attention
from kvquilt.model.probabilities import probabilities
from kvquilt.model.rows import RowPlan, SlotView, active

FILLED, HEADS, GROUPS, DIM = 30, 4, 2, 8


def marked(*slots: int) -> torch.Tensor:
    out = torch.zeros(20, dtype=torch.bool)
    out[list(slots)] = True
    return out


VIEWS = {
    "plain": None,
    "dropped": SlotView(torch.arange(20) * 3, 70),
    "shared": SlotView(torch.cat((torch.arange(5), torch.arange(5), torch.arange(10, 20))), -5),
    "tempered": SlotView(torch.arange(20), 0, marked(*range(3, 12)), 0.5, 0.8),
    "all tempered": SlotView(torch.arange(20), 0, marked(*range(20)), 1.7, 1.2),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("rows", [[29], [0, 2, 17], [26, 27, 28, 29]], ids=str)
def test_they_mix_the_values_as_attention_does(view: str, window: int | None, rows: list[int]) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, HEADS, len(rows), DIM, generator=generator)
    k, v = (torch.randn(1, GROUPS, FILLED, DIM, generator=generator) for _ in range(2))
    slots = torch.tensor(rows)
    with active(RowPlan(slots, FILLED, view=VIEWS[view])):
        mixed, _ = attention.attend(torch.nn.Module(), q, k, v, None, 0.4, window)
    weights = probabilities(q, k, slots, 0.4, window, VIEWS[view])
    assert torch.allclose(weights.sum(-1), torch.ones(HEADS, len(rows)), atol=1e-5)
    values = v[0].repeat_interleave(HEADS // GROUPS, 0)
    assert torch.allclose((weights @ values).transpose(0, 1), mixed[0], atol=1e-5)
    assert bool((weights[:, 0, rows[0] + 1 :] == 0).all()), "a row sees what stands behind it"
