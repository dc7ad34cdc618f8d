"""Who finds the document that the answer rests on: question attention over the reused cache, or a retriever."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvquilt.dense import Encoder, similarities
from kvquilt.evaluation.run.attended import document_attention
from kvquilt.evaluation.run.folder import Line
from kvquilt.evaluation.tasks.item import Item
from kvquilt.ledger import Ledger
from kvquilt.placement import place_runs
from kvquilt.repair.presets import METHODS
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe
from kvquilt.request import Request
from kvquilt.retrieval import rank

if TYPE_CHECKING:
    from kvquilt.engine import Engine

MASS, DENSITY, BM25, GIVEN, DENSE = "attention mass", "attention density", "BM25", "given retriever", "dense"


@dataclass(frozen=True, eq=False, slots=True)
class _Look:
    """Chooses nothing, and keeps what the question looks at."""

    seen: dict[int, float]
    probe: Probe = Probe.QUESTION
    granularity: Granularity = Granularity.DOCUMENT

    def least(self, scene: Scene) -> int:
        return 0

    def choose(self, scene: Scene) -> Choice:
        self.seen.update(document_attention(scene))
        return Choice(scene.slots[:0])


@dataclass(frozen=True, eq=False, slots=True)
class TargetHits:
    """One line for an item: a score for each of its documents by everybody who looks.

    Attention is that of the question over pure reuse: a document's mass is its share of the attention to documents, its
    density that over its tokens.

    Attributes:
        dense: also looks, where there is one.
    """

    engine: Engine
    dense: Encoder | None = None
    tenant: str | None = None

    def line(self, item: Item) -> Line:
        """``gold``, and ``scores``: name -> one number for each document."""
        seen: dict[int, float] = {}
        runs = self.engine.prompt(item.question, item.documents).runs(self.engine.model.tokenizer)
        method = replace(METHODS["none"], selector=_Look(seen))
        request = Request(self.engine.reader, place_runs(runs), method, 1, self.tenant)
        try:
            request.read(Ledger(), 1)
            lengths = [len(request.placement.span(run)) for run in seen]
        finally:
            request.release()
        mass = list(seen.values())
        scores = {
            MASS: mass,
            DENSITY: [each / length for each, length in zip(mass, lengths, strict=True)],
            BM25: rank(item.question, item.documents),
        }
        given = [document.score for document in item.documents if document.score is not None]
        if len(given) == len(item.documents):
            scores[GIVEN] = given
        if self.dense is not None:
            texts = [document.text for document in item.documents]
            scores[DENSE] = similarities(self.dense, item.question, texts)
        return {
            "gold": list(item.gold),
            "scores": {name: [float(f"{score:.6g}") for score in each] for name, each in scores.items()},
        }


def hit_rates(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``items``, ``chance`` (of a document drawn) and ``hit@1`` by name, over items whose gold is known.

    Of documents with equal scores the first counts.
    """
    known = [line for line in lines if line["gold"]]
    if not known:
        return {"items": 0, "chance": None, "hit@1": {}}
    names = [name for name in known[0]["scores"] if all(name in line["scores"] for line in known)]
    hits = {name: statistics.fmean(_best(line["scores"][name]) in line["gold"] for line in known) for name in names}
    chance = statistics.fmean(len(line["gold"]) / len(line["scores"][MASS]) for line in known)
    return {"items": len(known), "chance": chance, "hit@1": hits}


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
