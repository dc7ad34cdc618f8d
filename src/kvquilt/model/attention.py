"""Attention over slots, after the plan of the running forward; grouped heads without repeating keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvquilt.model.rows import FOLDED_ROWS, LayerReached, SlotView, active, current_plan
from kvquilt.model.together import Together

NAME = "kvquilt_slots"


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
    plan = current_plan()
    if plan is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
        return out, None
    layer: int = getattr(module, "layer_idx", -1)
    if isinstance(plan, Together):
        return _each_alone(module, query, layer, plan, scaling, sliding_window), None
    plan.windows.append(sliding_window)
    # slots that stand far apart may lie outside a window that is longer than all of them
    narrow = sliding_window is not None and (plan.view is not None or sliding_window < plan.filled)
    window = sliding_window if narrow else None
    if plan.watcher is not None:
        plan.watcher.attends(layer, plan, query, key, scaling or query.shape[-1] ** -0.5, window)
    if plan.until == layer:
        raise LayerReached
    plan.count_pairs(window)
    rows = plan.current
    if rows.is_prefill and window is None:
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2).contiguous(), None
    group = query.shape[1] // key.shape[1]
    tempered = None if plan.view is None else plan.view.marked(plan.filled)
    parts = []
    for b in rows.blocks(layer, window, group, query):
        q, k, v = query[:, :, b.first : b.last], key[:, :, b.low : b.high], value[:, :, b.low : b.high]
        if plan.view is None or tempered is None:
            parts.append(_folded(q, k, v, b.mask, scaling))
        else:
            parts.append(_tempered(q, k, v, b.mask, scaling, plan.view, tempered[b.low : b.high]))
    if not parts:  # a layer that none of the rows passes
        parts = [query.new_empty(*query.shape[:3], value.shape[-1])]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2).contiguous(), None


def _each_alone(
    module: torch.nn.Module,
    query: torch.Tensor,
    layer: int,
    together: Together,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Rows of several requests, each over its own cache."""
    parts = []
    for plan, cache, rows in together.each():
        slots = cache.slot_layers[layer]
        keys, values = slots.keys[:, :, : plan.filled], slots.values[:, :, : plan.filled]
        with active(plan):
            out, _ = attend(module, query[:, :, rows], keys, values, None, scaling, window)
        parts.append(out)
    return torch.cat(parts, dim=1)


def _folded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Few query heads of a group become rows of their key-value head: no repeated keys."""
    batch, heads, rows, dim = q.shape
    if rows > FOLDED_ROWS:
        grouped = heads != k.shape[1]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    folded = q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)
    out = scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, v.shape[-1])


def _tempered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    view: SlotView,
    marked: torch.Tensor,
) -> torch.Tensor:
    """Attention in two parts, merged by log-sum-exp: the marked slots' logits / T, their log-sum-exp times scale * T.

    Equals multiplying the marked slots' weights by one factor per row, so one softmax over corrected logits does it:
    ``log w = logit / T + (scale * T - 1) * logsumexp(logits / T)``. In fp32.
    """
    batch, heads, rows, dim = q.shape
    marked = marked.to(q.device)
    folded = q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim).float()
    logits = folded @ k.float().transpose(-1, -2) * (scaling or dim**-0.5)
    if mask is not None:
        logits = logits + (mask.repeat(heads // k.shape[1], 1) if rows > FOLDED_ROWS else mask).float()
    documents = (logits / view.temperature).masked_fill(~marked, -torch.inf)
    total = documents.logsumexp(-1, keepdim=True)
    # rows before the first document see none of the marked slots: their sum is -inf or the mask's own minimum
    factor = torch.where(total > torch.finfo(mask.dtype if mask is not None else torch.float32).min / 4, total, 0.0)
    corrected = logits / view.temperature + (view.scale * view.temperature - 1) * factor
    weights = torch.where(marked, corrected, logits).softmax(-1)
    return (weights @ v.float()).to(q.dtype).reshape(batch, heads, rows, v.shape[-1])


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Mask function under `NAME`: a plan brings its own masks, anything else gets the stock one."""
    return None if current_plan() is not None else sdpa_mask(*args, **kwargs)


def register() -> None:
    """Put both functions into transformers' registries under our own name; stock names stay untouched.

    Both, because an attention function without its mask function silently runs unmasked.
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _mask)
