"""How much a segment attended to what stood before it: Cache-Craft's statistics (arXiv 2502.15734)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.model.attention_rows import attention_rows
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.writers.chunk_scores import document_digest
from kvquilt.writers.extra import Observation

_NAMES = frozenset({"outside", "inter", "intra", "earlier", "earlier-tokens"})


@dataclass(frozen=True, slots=True)
class AttentionStatistics:
    """Side data of a segment encoded behind earlier documents; means over layers and heads, sums over rows and keys.

    ``outside`` fp32 [tokens]: attention that each row gives to the earlier documents (a shared prefix is none of them:
    it is there in every prompt, and its first token draws attention that means nothing). ``inter`` fp32 [E]: attention
    of all rows to each earlier document. ``intra`` fp32 [1]: of all rows to the segment itself. ``earlier`` uint8
    [E, 32]: `document_digest` of each earlier document; ``earlier-tokens`` int32 [E]: their lengths.

    Attributes:
        documents: ``(first, last + 1)`` of each earlier document within the ids that the segment is encoded behind,
            ascending and apart.
    """

    documents: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        edges = [0, *(edge for span in self.documents for edge in span)]
        if edges != sorted(edges) or any(first == last for first, last in self.documents):
            raise InputError("documents", "ascending spans that are not empty and do not overlap", self.documents)

    @property
    def names(self) -> frozenset[str]:
        return _NAMES

    @property
    def digest(self) -> str:
        edges = [edge for span in self.documents for edge in span]
        return digest_fields("kvquilt 2026-11 extra attention statistics v1", [("documents", encode_ids(edges))])

    def observe(self, behind: tuple[int, ...], ids: tuple[int, ...]) -> Observation:
        if self.documents and self.documents[-1][1] > len(behind):
            raise InputError("documents", f"spans within the {len(behind)} ids before the segment", self.documents)
        return _Seen(self.documents, behind, len(ids))


class _Seen(Observation):
    def __init__(self, documents: tuple[tuple[int, int], ...], behind: tuple[int, ...], tokens: int) -> None:
        self._documents, self._behind, self._layers = documents, behind, 0
        self._outside = torch.zeros(tokens, dtype=torch.float64)
        self._inter = torch.zeros(len(documents), dtype=torch.float64)
        self._intra = torch.zeros(1, dtype=torch.float64)

    def attends(
        self, layer: int, plan: RowPlan, query: torch.Tensor, keys: torch.Tensor, scaling: float, window: int | None
    ) -> None:
        self._layers += 1
        for block, weights in attention_rows(query, keys, plan.current.slots, scaling, window):
            mean = weights.mean(0)
            for j, (first, last) in enumerate(self._documents):
                given = mean[:, first:last].sum(-1).double().cpu()
                self._outside[block] += given
                self._inter[j] += given.sum()
            self._intra += mean[:, len(self._behind) :].sum().double().cpu()

    def side(self, model: LanguageModel, cache: SlotCache, counter: RowCounter | None) -> Mapping[str, torch.Tensor]:
        digests = b"".join(bytes.fromhex(document_digest(self._behind[a:b])) for a, b in self._documents)
        earlier = torch.tensor(list(digests), dtype=torch.uint8).view(len(self._documents), 32)
        return {
            "outside": (self._outside / self._layers).float(),
            "inter": (self._inter / self._layers).float(),
            "intra": (self._intra / self._layers).float(),
            "earlier": earlier,
            "earlier-tokens": torch.tensor([b - a for a, b in self._documents], dtype=torch.int32),
        }
