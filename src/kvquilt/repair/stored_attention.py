from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe
from kvquilt.writers.chunk_scores import ChunkScores, document_digest


@dataclass(frozen=True, slots=True)
class StoredAttention:
    """Rows that looked most at other documents when they were encoded: Cache-Craft (arXiv 2502.15734).

    How many rows of a document goes by its chunk scores: the more it leant on documents before it, and the fewer of
    those stand before it now in the same order, the larger its share. Nothing is run: the statistics were noted by
    the recipe ``in-situ``.

    Attributes:
        alpha: factor of every share.
    """

    alpha: float = 1.0
    probe: Probe = Probe.OFFLINE
    granularity: Granularity = Granularity.TOKEN

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise InputError("alpha", "must not be negative", self.alpha)

    def least(self, scene: Scene) -> int:
        return 0

    def choose(self, scene: Scene) -> Choice:
        placement = scene.placement
        digests = {i: document_digest(placement.runs[i].ids) for i in placement.documents()}
        slots, scores = [scene.slots[:0]], [torch.empty(0)]
        for i in scene.spendable:
            segment = scene.segments[i]
            if "outside" not in segment.side:
                rule = "the method needs documents with attention statistics: use it with writer=in-situ"
                raise InputError("writer", rule, placement.runs[i].document)
            earlier = [digests[j] for j in digests if j < i]
            share = ChunkScores.of(segment.side, segment.tokens).share(self.alpha, earlier)
            outside = segment.side["outside"]
            best = outside.argsort(descending=True, stable=True)[: math.ceil(share * segment.tokens)]
            slots.append(placement.span(i).start + best)
            scores.append(outside[best])
        rows, weights = torch.cat(slots), torch.cat(scores)
        order = rows.argsort()  # by slot first, so that equals keep that order
        return Choice(rows[order][weights[order].argsort(descending=True, stable=True)])
