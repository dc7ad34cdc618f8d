"""Attention over slots: which keys a row may see, and grouped heads without repeating keys and values.

    slots   0 1 2 3 4 5 6 7 8        rows = [2, 7, 8]: row 2 sees slots 0..2, row 7 sees 0..7, row 8 sees 0..8
            d d d d d d d q q        (d: a document's slot, q: the question's)

The mask goes by slot, never by the index inside `rows`: a gathered early row must not see later documents.
Positions are slot + offset, so a window in positions is the same window in slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "kvquilt_slots"
_BLOCK_ROWS = 512  # bounds the mask of a block, lets early rows skip late keys
_ACTIVE: ContextVar[RowPlan | None] = ContextVar("kvquilt_row_plan", default=None)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``first:last`` of a plan see slots ``low:high`` under `mask` ``[group * rows, high - low]``."""

    first: int
    last: int
    low: int
    high: int
    mask: torch.Tensor | None


@dataclass(eq=False, slots=True)
class RowPlan:
    """The rows one forward computes.

    Attributes:
        rows: ``[R]`` int64 on the CPU, strictly ascending slot indices.
        filled: slots that hold keys once the rows are written; slot ``filled`` and later are never read.
        offset: logical position of slot 0.
        keys_only: stop once the last layer's keys are written, for a compile pass, whose output nobody reads.
        windows: what each call of `attend` was given, in order; filled as the forward goes.
    """

    rows: torch.Tensor
    filled: int
    offset: int = 0
    keys_only: bool = False
    windows: list[int | None] = field(default_factory=list, repr=False)
    _index: slice | torch.Tensor | None = field(default=None, repr=False)
    _blocks: dict[tuple[object, ...], list[Block]] = field(default_factory=dict, repr=False)

    @property
    def index(self) -> slice | torch.Tensor:
        """How to write the rows: a slice where they are contiguous, which needs no gather. Asked once per layer."""
        if self._index is None:
            first, last = int(self.rows[0]), int(self.rows[-1])
            self._index = slice(first, last + 1) if last - first + 1 == len(self.rows) else self.rows
        return self._index

    @property
    def is_prefill(self) -> bool:
        """All slots are computed, so plain causal attention is right."""
        return len(self.rows) == self.filled

    def blocks(self, window: int | None, group: int, like: torch.Tensor) -> list[Block]:
        """Blocks of rows with their masks for one window; built once per forward and window."""
        key = (window, group, like.dtype, like.device)
        if key not in self._blocks:
            self._blocks[key] = [self._block(i, window, group, like) for i in range(0, len(self.rows), _BLOCK_ROWS)]
        return self._blocks[key]

    def _block(self, first: int, window: int | None, group: int, like: torch.Tensor) -> Block:
        rows = self.rows[first : first + _BLOCK_ROWS]
        high = int(rows[-1]) + 1
        low = 0 if window is None else max(0, int(rows[0]) - window + 1)
        if len(rows) == 1:
            return Block(first, first + 1, low, high, None)
        keys = torch.arange(low, high)
        hidden = keys > rows[:, None]
        if window is not None:
            hidden |= keys <= rows[:, None] - window
        # a float mask: some kernels add a boolean one as 0 and 1
        mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, torch.finfo(like.dtype).min)
        return Block(first, first + len(rows), low, high, mask.repeat(group, 1).to(like.device))


class KeysWritten(Exception):  # no error: it leaves a forward that has done its work
    """The last layer's keys and values are in their slots."""


@contextmanager
def active(plan: RowPlan) -> Iterator[None]:
    """Make `plan` the one that attention and slots follow inside the block."""
    token = _ACTIVE.set(plan)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def current_plan() -> RowPlan | None:
    return _ACTIVE.get()


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function under `NAME`.

    Args:
        query: ``[batch, heads, rows, key_dim]``; key, value: ``[batch, kv_heads, filled, dim]``, unrepeated.

    Returns:
        ``[batch, rows, heads, value_dim]``, contiguous, and no weights.
    """
    plan = _ACTIVE.get()
    if plan is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
        return out, None
    plan.windows.append(sliding_window)
    window = sliding_window if sliding_window is not None and sliding_window < plan.filled else None
    if plan.is_prefill and window is None:
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous(), None
    group = query.shape[1] // key.shape[1]
    parts = [
        _folded(query[:, :, b.first : b.last], key[:, :, b.low : b.high], value[:, :, b.low : b.high], b.mask, scaling)
        for b in plan.blocks(window, group, query)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2).contiguous(), None


def _folded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Query heads of a group become rows of their key-value head: no repeated keys."""
    batch, heads, rows, dim = q.shape
    folded = q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)
    out = scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, v.shape[-1])


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Mask function under `NAME`: a plan brings its own masks, anything else gets the stock one."""
    return None if _ACTIVE.get() is not None else sdpa_mask(*args, **kwargs)


def register() -> None:
    """Put both functions into transformers' registries under our own name; stock names stay untouched.

    Both, because an attention function without its mask function silently runs unmasked.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _mask)
