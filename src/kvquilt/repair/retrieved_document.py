from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvquilt.errors import InputError
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe


@dataclass(frozen=True, slots=True)
class RetrievedDocument:
    """The retriever's best documents, best first. Behind the order `target_last` they are a contiguous tail.

    The scores come with the request or from BM25, so choosing costs no forward pass.

    Attributes:
        documents: how many of the best ones.
        part: which rows a budget that is too small for a document leaves: its ``tail``, its ``head``, or the
            ``window`` of the document with most of the question's tokens.
    """

    documents: int = 1
    part: Literal["tail", "head", "window"] = "tail"
    probe: Probe = Probe.RETRIEVER
    granularity: Granularity = Granularity.DOCUMENT

    def __post_init__(self) -> None:
        if self.documents < 1:
            raise InputError("documents", "must be at least 1", self.documents)
        if self.part not in ("tail", "head", "window"):
            raise InputError("part", "must be tail, head or window", self.part)

    def least(self, scene: Scene) -> int:
        return 0

    def choose(self, scene: Scene) -> Choice:
        best = [i for i in scene.placement.ranking[: self.documents] if i in scene.spendable]
        return Choice(torch.cat([scene.slots[:0], *(self._rows(scene, i) for i in best)]))

    def _rows(self, scene: Scene, run: int) -> torch.Tensor:
        span = scene.placement.span(run)
        rows = torch.arange(span.start, span.stop)
        if self.part == "head":
            return rows
        if self.part == "tail":
            return rows.flip(0)
        # outwards from the token around which most of the question's tokens stand
        ids = torch.tensor(scene.placement.ids)
        shared = torch.isin(ids[rows], ids[scene.question]).double()
        reach = torch.arange(len(rows), dtype=torch.float64)
        # in parts: all pairs of a long document's tokens take more memory than the request itself
        parts = [(shared / (1 + (part[:, None] - reach).abs())).sum(1) for part in reach.split(256)]
        density = torch.cat(parts)
        return rows[(reach - density.argmax()).abs().argsort(stable=True)]
