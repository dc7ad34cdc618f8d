"""Floating-point operations of a prompt by analysis, in two ways that must never be compared with each other.

`row_flops` is kvquilt's own count, the one that ledgers hold, split by rows: documents on one side, inline text on the
other. `published_flops` is the count of KV Packet's paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvquilt.accounting import attention_flops
from kvquilt.model.language_model import LanguageModel
from kvquilt.placement import Placement


def row_flops(model: LanguageModel, positions: Sequence[int]) -> float:
    """Operations of rows at these positions through every layer: weights, and attention to all that each row sees.

    All rows of a prompt and `head_flops` are its full prefill.
    """
    seen = torch.tensor(positions, dtype=torch.int64) + 1
    pairs = sum(int((seen if w is None else seen.clamp(max=w)).sum()) for w in model.capability.windows)
    return 2.0 * model.layer_weights * len(seen) + attention_flops(model, pairs)


def head_flops(model: LanguageModel) -> float:
    """Operations of one row's logits."""
    return 2.0 * model.head_weights


def inline_positions(placement: Placement) -> list[int]:
    """Positions of the tokens between and behind the documents, and of those before them."""
    runs = zip(placement.runs, placement.positions, strict=True)
    return [at for run, first in runs if run.document is None for at in range(first, first + len(run.ids))]


@dataclass(frozen=True, slots=True)
class Shape:
    """What `published_flops` counts with.

    Attributes:
        normed: queries and keys are normalised (Qwen3).
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    normed: bool = False

    @classmethod
    def of(cls, model: LanguageModel) -> Shape:
        """That of a model whose layers are attention and a gated perceptron of three matrices."""
        config, c = model.hf.config.get_text_config(), model.capability
        normed = any("q_norm" in name for name, _ in model.hf.named_parameters())
        width, inner = int(config.hidden_size), int(config.intermediate_size)
        return cls(c.layers, width, c.heads, c.kv_heads, c.key_dim, inner, normed)


def published_flops(shape: Shape, rows: int, cached: int = 0) -> float:
    """`rows` computed behind `cached` slots as KV Packet counts them: attention is a rectangle, no output head."""
    s, heads = rows, (shape.heads + shape.kv_heads) * shape.head_dim
    projections = 4 * shape.width * shape.head_dim * (shape.heads + shape.kv_heads) * s  # queries, keys, values, output
    rotation = 3 * s * heads
    attention = 4 * s * (s + cached) * shape.head_dim * shape.heads
    perceptron = 6 * s * shape.width * shape.inner
    norms = 10 * s * shape.width + (4 * s * heads if shape.normed else 0)
    return float(shape.layers * (projections + rotation + attention + perceptron + norms))
