"""Cache-Craft's chunk scores (arXiv 2502.15734): how far a segment that was encoded behind other documents can be
trusted behind new ones, and the share of its rows to compute again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from kvquilt.identity import digest_fields, encode_ids


def document_digest(ids: Sequence[int]) -> str:
    """Hex digest (64 characters) by which documents before a segment are compared."""
    return digest_fields("kvquilt 2026-11 document ids v1", [("ids", encode_ids(ids))])


def kept_attention(inter: Sequence[float], old: Sequence[str], new: Sequence[str]) -> float:
    """β: of the attention that a segment gave to the documents `old`, the part given to those also in `new`.

    Args:
        inter: attention to each of `old`.

    0 where it gave none at all, though there were documents: nothing then speaks for the new ones.
    """
    total, present = sum(inter), set(new)
    return sum(given for given, name in zip(inter, old, strict=True) if name in present) / total if total > 0 else 0.0


def order_penalty(old: Sequence[str], new: Sequence[str]) -> float:
    """γ: of the pairs of common documents, the part that stands the other way round; 0 below two common ones.

    A document that occurs twice counts where it stands first.
    """
    places = {name: place for place, name in reversed(list(enumerate(new)))}
    common = [places[name] for name in dict.fromkeys(old) if name in places]
    pairs = list(combinations(common, 2))
    return sum(first > second for first, second in pairs) / len(pairs) if pairs else 0.0


def context_match(inter: Sequence[float], old: Sequence[str], new: Sequence[str]) -> float:
    """β' = β (1 - γ). Of a segment that was encoded behind no document: 1 if none stands before it now, else 0."""
    if not old:
        return 0.0 if new else 1.0
    return kept_attention(inter, old, new) * (1 - order_penalty(old, new))


def context_impact(inter: Sequence[float], lengths: Sequence[int], intra: float, tokens: int) -> float:
    """CCI = sigmoid(a / b), so at least 0.5: attention to earlier documents over attention to itself, per pair.

    Args:
        inter: attention to each earlier document, of as many tokens as `lengths` says.
        intra: attention to the segment itself, of `tokens` tokens.
    """
    outside = sum(given / (tokens * length) for given, length in zip(inter, lengths, strict=True))
    inside = intra / tokens**2
    return 1 / (1 + math.exp(-outside / inside))


def recompute_share(alpha: float, impact: float, match: float) -> float:
    """α · CCI · (1 - β'), between 0 and 1: the share of a segment's rows to compute again."""
    return min(1.0, max(0.0, alpha * impact * (1 - match)))


@dataclass(frozen=True, slots=True)
class ChunkScores:
    """What is known of one segment that was encoded behind the documents `earlier`.

    Attributes:
        inter: attention to each of `earlier`, summed over rows and keys, mean over layers and heads; `lengths`
            likewise their tokens.
        intra: attention to the segment itself, of `tokens` tokens.
    """

    earlier: tuple[str, ...]
    inter: tuple[float, ...]
    lengths: tuple[int, ...]
    intra: float
    tokens: int

    @classmethod
    def of(cls, side: Mapping[str, torch.Tensor], tokens: int) -> ChunkScores:
        """From the side data of a segment; see `AttentionStatistics`."""
        return cls(
            earlier=tuple(bytes(row.tolist()).hex() for row in side["earlier"]),
            inter=tuple(side["inter"].tolist()),
            lengths=tuple(side["earlier-tokens"].tolist()),
            intra=float(side["intra"]),
            tokens=tokens,
        )

    def share(self, alpha: float, new: Sequence[str]) -> float:
        """Share of the rows to compute again behind the documents `new` (their digests, in order)."""
        impact = context_impact(self.inter, self.lengths, self.intra, self.tokens)
        return recompute_share(alpha, impact, context_match(self.inter, self.earlier, new))
