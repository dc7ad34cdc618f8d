"""What the last inline rows of a prompt attend to, in a stock model that takes its tokens one at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from kvquilt.placement import Placement
from tests.oracle import far, stock
from tests.repair.passes import inline_spans
from tests.repair.tokenwise import _without_window, stored, walk

LAYERS, HEADS, GROUP = 3, 4, 2  # of the tiny models


def queries(
    family: str, placement: Placement, visible: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Rotated queries ``[layers, heads, question, dim]`` and keys ``[layers, heads, tokens, dim]`` of a stock model,
    which takes the inline tokens one at a time, and every token's position."""
    asking = len(placement.runs[-1].ids)
    where = torch.tensor(placement.positions).repeat_interleave(torch.tensor([len(r.ids) for r in placement.runs]))
    ahead = torch.tensor(placement.starts).repeat_interleave(torch.tensor([len(r.ids) for r in placement.runs]))
    positions = (where + torch.arange(placement.tokens) - ahead).tolist()
    inline = torch.zeros(LAYERS, placement.tokens, dtype=torch.bool)
    for span in inline_spans(placement):
        inline[:, span.start : span.stop] = True
    plain = _without_window(stock(family))
    seen: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    handles = []
    for n, layer in enumerate(plain.base_model.layers):
        last = getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj)
        handles.append(last.register_forward_hook(lambda m, a, out, n=n: seen[n].append(out.reshape(HEADS, -1))))
    try:
        _, after = walk(
            stock(family), placement.ids, stored(stock(family), placement), inline, visible=visible, positions=positions
        )
    finally:
        for handle in handles:
            handle.remove()
    q = torch.stack([torch.stack(rows[-asking:], 1) for rows in seen])
    rotated = torch.stack([_rotated(plain, x, n, positions[-asking:]) for n, x in enumerate(q)])
    return rotated.double(), torch.stack([k for k, _ in after]).repeat_interleave(GROUP, 1).double(), positions


def _rotated(hf: PreTrainedModel, x: torch.Tensor, layer: int, positions: list[int]) -> torch.Tensor:
    kinds = getattr(hf.config, "layer_types", None)
    more = (kinds[layer],) if hf.config.model_type == "gemma3_text" and kinds is not None else ()
    cos, sin = hf.base_model.rotary_emb(x[None], torch.tensor([positions]), *more)
    half = x.shape[-1] // 2
    return x * cos[0] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[0]


def weights(
    family: str, placement: Placement, scope: Iterable[int], visible: torch.Tensor | None = None
) -> torch.Tensor:
    """``[layers, heads, question, tokens]`` fp64: softmax over the slots `scope`, causal and within the window."""
    q, k, positions = queries(family, placement, visible)
    asking = q.shape[2]
    out = torch.zeros(LAYERS, HEADS, asking, placement.tokens, dtype=torch.float64)
    start = placement.tokens - asking
    for n, layer in enumerate(stock(family).base_model.layers):
        window = getattr(layer.self_attn, "sliding_window", None) or 10**6
        for row in range(asking):
            sees = [s for s in sorted(scope) if s <= start + row and positions[start + row] - positions[s] < window]
            if sees:
                logits = (k[n][:, sees] @ q[n][:, row, :, None])[..., 0] * layer.self_attn.scaling
                out[n, :, row, sees] = logits.softmax(-1)
    return out


def agree(measured: torch.Tensor, truth: torch.Tensor) -> bool:
    return far(measured.double(), truth) < 1e-4
