"""Which document the question looks at, over the reused cache: attention in the retriever's place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvquilt.repair.attention_scores import Received
from kvquilt.repair.question_attention import QuestionAttention
from kvquilt.repair.retrieved_document import RetrievedDocument
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe

_QUESTION = QuestionAttention()


@dataclass(frozen=True, slots=True)
class AttendedDocument:
    """The documents that the question attends to most, as the retriever's best are, where they stand.

    The probe is that of `QuestionAttention` over all layers and is charged.
    """

    document: RetrievedDocument
    probe: Probe = Probe.QUESTION
    granularity: Granularity = Granularity.DOCUMENT

    def least(self, scene: Scene) -> int:
        return _QUESTION.least(scene)

    def choose(self, scene: Scene) -> Choice:
        if not scene.tokens:
            return Choice(scene.slots)
        mass = document_attention(scene)
        ranking = tuple(sorted(mass, key=lambda run: -mass[run]))
        return self.document.choose(replace(scene, placement=replace(scene.placement, ranking=ranking)))


def document_attention(scene: Scene) -> dict[int, float]:
    """Of every document's run, the share of the question's attention to documents that it gets; the sum is 1.

    A mean over heads, the question's rows and layers. Exact documents count like any other. Runs the probe, which is
    charged.
    """
    spans = {i: scene.placement.span(i) for i in scene.placement.documents()}
    scope = torch.zeros(scene.placement.tokens, dtype=torch.bool)
    for span in spans.values():
        scope[span.start : span.stop] = True
    counted = _QUESTION.counted(scene.layers)
    received = Received(scene.question, scope, counted, "mean", "mean")
    scene.probe(scene.inline_slots, received, until=max(counted), queries=True)
    return {i: float(received.scores[span.start : span.stop].sum()) for i, span in spans.items()}
