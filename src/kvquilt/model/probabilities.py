"""What rows attend to, as the model's own attention over slots would have it: for few rows, one layer at a time."""

from __future__ import annotations

import torch

from kvquilt.model.attention_rows import attention_rows
from kvquilt.model.rows import SlotView


def probabilities(
    query: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
    window: int | None,
    view: SlotView | None = None,
) -> torch.Tensor:
    """Weights ``[heads, rows, filled]`` fp32 after the softmax, every head its own; a row's sum to 1.

    Args:
        query: ``[1, heads, rows, dim]``, rotated; keys ``[1, groups, filled, dim]``, unrepeated.
        slots: ``[rows]`` int64, the rows' slots, ascending.
        view: where slots stand, and which are tempered; tempered weights are those of `SlotView` (see there), whose
            part is scaled and merged with the rest.
    """
    heads, rows, filled = query.shape[1], query.shape[2], keys.shape[2]
    marked = None if view is None else view.marked(filled)
    if view is not None and marked is not None:
        return _tempered(query, keys, slots, scaling, window, view, marked)
    out = torch.zeros(heads, rows, filled, device=query.device)
    for block, weights in attention_rows(query, keys, slots, scaling, window, view=view):
        out[:, block, : weights.shape[-1]] = weights
    return out


def _tempered(
    query: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
    window: int | None,
    view: SlotView,
    marked: torch.Tensor,
) -> torch.Tensor:
    """Marked slots share ``scale * T`` times the log-sum-exp of their logits / T; the others keep theirs."""
    heads, rows, filled = query.shape[1], query.shape[2], keys.shape[2]
    seen = torch.arange(filled)
    hidden = seen > slots[:, None]
    if window is not None:
        hidden |= view.at(slots)[:, None] - view.at(seen) >= window
    hidden, marked = hidden.to(query.device), marked.to(query.device)
    folded = query[0].float().reshape(keys.shape[1], -1, query.shape[-1])
    logits = (folded @ keys[0].float().transpose(1, 2) * scaling).view(heads, rows, filled)
    inside = (logits / view.temperature).masked_fill(hidden | ~marked, -torch.inf)
    outside = logits.masked_fill(hidden | marked, -torch.inf)
    total = inside.logsumexp(-1, keepdim=True)
    part, rest = view.scale * view.temperature * total, outside.logsumexp(-1, keepdim=True)
    share = torch.cat((part, rest), -1).softmax(-1)
    # a row that sees none of them gives them nothing
    own = torch.where(total.isneginf(), 0.0, (inside - total).exp())
    return share[..., :1] * own + share[..., 1:] * torch.where(rest.isneginf(), 0.0, (outside - rest).exp())
