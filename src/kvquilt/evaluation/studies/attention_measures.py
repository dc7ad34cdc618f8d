"""How far attention under an arm is from full prefill's, document token by document token; each number by layer, head.

Weights are compared by token, not by position: a document that an arm has moved is the same document. A token that has
no slot is attended to by nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvquilt.evaluation.studies.attention_look import Look, Spot

FIRST = 8  # tokens of a document whose density is told one by one
BINS = 20  # of a document's length
FRONT, REAR = 0.1, 0.9
REGIONS = ("front", "interior", "rear")


@dataclass(frozen=True, eq=False, slots=True)
class Compared:
    """An arm against full prefill on one item: means over its documents, NaN where there is nothing to take one of.

    Attributes:
        raw, within: ``[layers, heads, 3]``: mean absolute difference of weights per token, by region; of weights over
            all that a row sees, and of those divided by their sum over the document.
        by_position: ``[layers, bins]``: the raw one over heads, by place in the document.
        density: ``[layers, first]``: the arm's own weight on the first tokens, over heads and rows.
        interior: ``[layers]``: its mean weight on a token of the interior.
        error, norm: ``[layers, heads]``: squares of the difference of what is retrieved, and of what full prefill
            retrieves, summed over rows and documents.
        cosine: ``[layers, heads]``: cosine distance of the two. mass: difference of the weight of a whole document.
        seen: share of the documents' tokens that have slots.
    """

    raw: torch.Tensor
    within: torch.Tensor
    by_position: torch.Tensor
    density: torch.Tensor
    interior: torch.Tensor
    error: torch.Tensor
    norm: torch.Tensor
    cosine: torch.Tensor
    mass: torch.Tensor
    seen: float


def compare(full: Look, arm: Look) -> Compared:
    """Layer by layer: nothing of a layer but its means outlives it."""
    layers = [_layer(full, arm, n) for n in range(full.layers)]
    raw, within, by_position, density, interior, error, norm, cosine, mass = (
        torch.stack(each) for each in zip(*layers, strict=True)
    )
    tokens = torch.cat([spot.tokens for spot in arm.spots])
    seen = float((tokens >= 0).double().mean())
    return Compared(raw, within, by_position, density, interior, error, norm, cosine, mass, seen)


def region_means(values: torch.Tensor) -> torch.Tensor:
    """``[..., 3]`` of ``[..., n]``: means over the tokens of front, interior and rear, by where their middles stand."""
    at = _middles(values.shape[-1])
    masks = (at < FRONT, (at >= FRONT) & (at < REAR), at >= REAR)
    return torch.stack([values[..., mask].mean(-1) for mask in masks], -1)  # of nothing: NaN


def interior_mean(values: torch.Tensor) -> torch.Tensor:
    """``[...]`` of ``[..., n]``: the mean over the interior, a token counting as much as it lies in it."""
    n = values.shape[-1]
    edges = torch.arange(n + 1, dtype=torch.float64, device=values.device) / n
    inside = (edges[1:].clamp(max=REAR) - edges[:-1].clamp(min=FRONT)).clamp(min=0)
    return values.double() @ inside / inside.sum()


def _layer(full: Look, arm: Look, layer: int) -> tuple[torch.Tensor, ...]:
    true, mine = full.weights(layer), arm.weights(layer)
    true_values, my_values = full.values(layer), arm.values(layer)
    found = []
    for here, there in zip(full.spots, arm.spots, strict=True):
        a, b = _of_tokens(true, here), _of_tokens(mine, there)
        off = (b - a).abs().mean(1)
        means = b.mean((0, 1))
        r, s = _retrieved(true, true_values, here), _retrieved(mine, my_values, there)
        weight, other = (w[..., spot.around.to(w.device)].sum(-1) for w, spot in ((true, here), (mine, there)))
        found.append(
            (
                region_means(off),
                region_means((_divided(b) - _divided(a)).abs().mean(1)),
                _binned(off.mean(0)),
                torch.cat((means, means.new_full((FIRST,), torch.nan)))[:FIRST],
                interior_mean(means),
                (s - r).square().sum((1, 2)),
                r.square().sum((1, 2)),
                _cosine_distance(r, s),
                (other - weight).abs().mean(1),
            )
        )
    parts = [torch.stack(each).double().cpu() for each in zip(*found, strict=True)]
    sums = (5, 6)
    return tuple(part.sum(0) if n in sums else part.nanmean(0) for n, part in enumerate(parts))


def _middles(count: int) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def _of_tokens(weights: torch.Tensor, spot: Spot) -> torch.Tensor:
    """``[heads, Q, n]``: 0 for a token without a slot."""
    at = spot.tokens.to(weights.device)
    return weights[..., at.clamp(min=0)] * (at >= 0)


def _divided(weights: torch.Tensor) -> torch.Tensor:
    """By their sum over the document; 0 where a row sees nothing of it."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 0.0)


def _binned(values: torch.Tensor) -> torch.Tensor:
    """``[bins]`` of ``[n]``: means by place; NaN where a short document has no token."""
    at = (_middles(len(values)) * BINS).long().to(values.device)
    total = torch.zeros(BINS, dtype=torch.float64, device=values.device).index_add_(0, at, values.double())
    return total / torch.bincount(at, minlength=BINS)


def _retrieved(weights: torch.Tensor, values: torch.Tensor, spot: Spot) -> torch.Tensor:
    """``[heads, Q, dim]``: what the rows take from the document, soft tokens around it included."""
    heads, rows, _ = weights.shape
    at = spot.around.to(weights.device)
    folded = weights[..., at].reshape(len(values), heads // len(values) * rows, len(at)) @ values[:, at]
    return folded.reshape(heads, rows, values.shape[-1])


def _cosine_distance(r: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """``[heads]``: over the rows in which both take something; NaN where none does."""
    r, s = r.double(), s.double()
    product = r.norm(dim=-1) * s.norm(dim=-1)
    distance = (1 - (r * s).sum(-1) / product).clamp(min=0)  # rounding goes below
    return torch.where(product > 0, distance, torch.nan).nanmean(-1)
