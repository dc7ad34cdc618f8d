from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from kvquilt.errors import InputError
from kvquilt.repair.attention_scores import Received
from kvquilt.repair.scene import Scene, joined
from kvquilt.repair.selector import Choice, Granularity, Probe

_SCOPES = ("documents", "documents+question", "all")


@dataclass(frozen=True, slots=True)
class QuestionAttention:
    """Rows that the question attends to most; one selector whose settings give several published methods.

    All inline rows run over the placed segments up to the last layer that counts, which is left once its queries are
    there; scores are the weights that the question's rows give to the documents' keys, in fp32, after a softmax of
    each head's own. Costs a token-layer per inline row and layer.

    Papers: ProphetKV (arXiv 2602.02579), A3 (2511.17560), FusionRAG (2601.12904), InfoFlow KV (2603.05353), QCFuse
    (2606.05875).

    Attributes:
        context_share: what the question sees of each document on its way: 1 all, 0 nothing, between them that share
            of its tokens by the digest that its writer noted. Documents on which nothing is spent and inline text are
            seen always.
        layers: those that count, from the end where negative; empty for all.
        around: a depth between 0 and 1; the three layers around it count in place of `layers`. 0 for none.
        softmax_over: keys over which weights sum to 1: ``documents``, ``documents+question`` or ``all`` that is seen.
        reduce_heads: ``mean`` or ``max``, first; a sum ranks as a mean does.
        reduce_rows: ``mean``, ``max`` or ``l2`` over the question's rows, next; layers are averaged.
    """

    context_share: float = 1.0
    layers: tuple[int, ...] = ()
    around: float = 0.0
    softmax_over: Literal["documents", "documents+question", "all"] = "documents"
    reduce_heads: Literal["mean", "max"] = "mean"
    reduce_rows: Literal["mean", "max", "l2"] = "mean"
    probe: Probe = Probe.QUESTION
    granularity: Granularity = Granularity.TOKEN

    def __post_init__(self) -> None:
        if not 0 <= self.context_share <= 1:
            raise InputError("context_share", "must be between 0 and 1", self.context_share)
        if not 0 <= self.around <= 1 or (self.around and self.layers):
            raise InputError("around", "must be between 0 and 1, and stands in place of layers", self.around)
        if self.softmax_over not in _SCOPES:
            raise InputError("softmax_over", f"must be one of {', '.join(_SCOPES)}", self.softmax_over)
        if self.reduce_heads not in ("mean", "max"):
            raise InputError("reduce_heads", "must be mean or max", self.reduce_heads)
        if self.reduce_rows not in ("mean", "max", "l2"):
            raise InputError("reduce_rows", "must be mean, max or l2", self.reduce_rows)

    def least(self, scene: Scene) -> int:
        counted = self.counted(scene.layers)
        return scene.probe_charge(len(scene.inline_slots), max(counted)) if scene.tokens else 0

    def choose(self, scene: Scene) -> Choice:
        if not scene.tokens:
            return Choice(scene.slots)
        return Choice(scene.ranked(self.scores(scene, self.visible(scene))))

    def counted(self, layers: int) -> frozenset[int]:
        """Numbers of the layers that count, in a model of so many.

        Raises:
            InputError: it has no such layer.
        """
        if self.around:
            middle = min(max(1, round(self.around * layers)), max(1, layers - 2))
            return frozenset(n for n in (middle - 1, middle, middle + 1) if n < layers)
        given = self.layers or range(layers)
        if any(not -layers <= n < layers for n in given):
            raise InputError("layers", f"the model's are 0 to {layers - 1}, or -{layers} to -1", self.layers)
        return frozenset(n % layers for n in given)

    def scores(self, scene: Scene, visible: torch.Tensor | None) -> torch.Tensor:
        """Run the probe: ``[tokens]`` fp32, of `scene.slots`.

        Args:
            visible: slots that the probe sees, see `RowPlan`.
        """
        counted = self.counted(scene.layers)
        received = Received(scene.question, self._scope(scene), counted, self.reduce_heads, self.reduce_rows)
        scene.probe(scene.inline_slots, received, until=max(counted), queries=True, visible=visible)
        return received.scores[scene.slots]

    def visible(self, scene: Scene) -> torch.Tensor | None:
        """What the probe sees by `context_share`, see `RowPlan`.

        Raises:
            InputError: a document has no digest of that share.
        """
        if self.context_share == 1:
            return None
        seen = torch.ones(scene.placement.tokens, dtype=torch.bool)
        seen[joined([scene.placement.extent(i) for i in scene.spendable])] = False
        seen[scene.inline_slots] = True
        if self.context_share == 0:
            return seen
        by_layer = seen.repeat(scene.layers, 1)
        for run in scene.spendable:
            span, digest = scene.placement.span(run), scene.segments[run].side.get("digest")
            count = math.ceil(self.context_share * len(span) - 1e-9)  # doubles lie a little above whole numbers
            if digest is None or digest.shape[1] < count:
                rule = f"of a document's {len(span)} tokens needs a digest of {count}; its writer noted "
                noted = "none" if digest is None else f"one of {digest.shape[1]}"
                raise InputError("context_share", rule + noted, self.context_share)
            by_layer.scatter_(1, digest[:, :count].long() + span.start, True)
        return by_layer

    def _scope(self, scene: Scene) -> torch.Tensor | None:
        if self.softmax_over == "all":
            return None
        scope = torch.zeros(scene.placement.tokens, dtype=torch.bool)
        for run in scene.placement.documents():
            span = scene.placement.span(run)
            scope[span.start : span.stop] = True
        if self.softmax_over == "documents+question":
            scope[scene.question] = True
        return scope
