"""Attention weights as numbers, block by block: a map of a long document is never kept whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK_WEIGHTS = 1 << 23  # 32 MiB of fp32


def attention_rows(
    query: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, scaling: float, window: int | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Weights of consecutive blocks of rows, in fp32: causal by slot and, where given, within `window`.

    Args:
        query: ``[1, heads, rows, dim]``; keys ``[1, groups, filled, dim]``, unrepeated.
        slots: ``[rows]`` int64, the rows' slots, ascending.

    Yields:
        The block within `rows` and its weights ``[heads, block, seen]``; `seen` ends at the block's last row.
    """
    _, heads, rows, dim = query.shape
    groups, filled = keys.shape[1], keys.shape[2]
    step = max(1, _BLOCK_WEIGHTS // (heads * filled))
    for first in range(0, rows, step):
        block = slice(first, min(rows, first + step))
        own = slots[block].to(query.device)[:, None]
        seen = torch.arange(int(slots[block][-1]) + 1, device=query.device)
        hidden = seen > own
        if window is not None:
            hidden |= own - seen >= window
        folded = query[0, :, block].float().reshape(groups, -1, dim)  # heads of a group become rows of their keys
        logits = folded @ keys[0, :, : len(seen)].float().transpose(1, 2) * scaling
        logits = logits.view(heads, -1, len(seen)).masked_fill_(hidden, -torch.inf)
        yield block, logits.softmax(-1)
