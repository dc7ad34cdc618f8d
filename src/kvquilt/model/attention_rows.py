"""Attention weights as numbers, block by block: a map of a long document is never kept whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvquilt.model.rows import SlotView

_BLOCK_WEIGHTS = 1 << 23  # 32 MiB of fp32


def attention_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
    window: int | None,
    scope: torch.Tensor | None = None,
    view: SlotView | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Weights of consecutive blocks of rows, in fp32: causal by slot and, where given, within `window`.

    Args:
        query: ``[1, heads, rows, dim]``; keys ``[1, groups, filled, dim]``, unrepeated.
        slots: ``[rows]`` int64, the rows' slots, ascending.
        scope: ``[filled]`` bool, slots over which a row's weights sum to 1; None for all. Others get 0, and so does
            every slot from a row that sees none of them.
        view: where slots stand, if not at their own numbers; a window goes by it.

    Yields:
        The block within `rows` and its weights ``[heads, block, seen]``; `seen` ends at the block's last row.
    """
    _, heads, rows, dim = query.shape
    groups, filled = keys.shape[1], keys.shape[2]
    step = max(1, _BLOCK_WEIGHTS // (heads * filled))
    fp32 = keys[0].float()
    for first in range(0, rows, step):
        block = slice(first, min(rows, first + step))
        own = slots[block, None]
        seen = torch.arange(int(own[-1]) + 1)
        hidden = seen > own
        if window is not None:
            hidden |= (own - seen if view is None else view.at(own) - view.at(seen)) >= window
        if scope is not None:
            hidden |= ~scope[: len(seen)]
        hidden = hidden.to(query.device)
        folded = query[0, :, block].float().reshape(groups, -1, dim)  # heads of a group become rows of their keys
        logits = folded @ fp32[:, : len(seen)].transpose(1, 2) * scaling
        weights = logits.view(heads, -1, len(seen)).masked_fill_(hidden, -torch.inf).softmax(-1)
        if scope is not None:
            weights.masked_fill_(hidden.all(-1, keepdim=True), 0.0)
        yield block, weights
