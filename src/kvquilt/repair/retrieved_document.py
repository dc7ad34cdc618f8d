from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvquilt.placement import Placement


@dataclass(frozen=True, slots=True)
class RetrievedDocument:
    """The retriever's best document, whole. Behind the order `target_last` it is a contiguous tail with the question.

    The scores come with the request or from BM25, so choosing costs no forward pass.
    """

    probe: Literal["retriever"] = "retriever"
    granularity: Literal["document"] = "document"

    def select(self, placement: Placement) -> list[range]:
        return [] if placement.target is None else [placement.span(placement.target)]
