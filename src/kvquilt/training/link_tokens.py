"""Training link tokens: documents are as the isolated writer stores them; the frozen model reads the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvquilt.errors import InputError
from kvquilt.model.graph import Read, read
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.packed import side_by_side
from kvquilt.model.parts import Parts
from kvquilt.placement import place_runs
from kvquilt.prompt import Run
from kvquilt.repair.operator import assemble
from kvquilt.repair.scene import joined
from kvquilt.segment import CompiledSegment
from kvquilt.training.components import Components, Shape
from kvquilt.training.lesson import Lesson
from kvquilt.training.teacher import Branches
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.link_tokens import link_ids


@dataclass(frozen=True, slots=True)
class LinkShape:
    """How many link tokens there are.

    Attributes:
        each: behind every document.
        sets: 1 shares them among all documents; otherwise every place in a prompt has its own, up to so many.
    """

    each: int = 5
    sets: int = 1

    def __post_init__(self) -> None:
        if min(self.each, self.sets) < 1:
            raise InputError("links", "each and sets are at least 1", f"{self}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """What can be trained."""
        return ("links",)

    def kind_of(self, name: str) -> str:
        """Of the tensor of that name."""
        return name

    def drawn(self, model: LanguageModel, seed: int) -> dict[str, torch.Tensor]:
        """Tensors to begin with: ``links`` ``[sets, each, width]`` fp32, drawn like a token's embedding."""
        rows = Components.fresh(model, Shape(rank=0, trailer=self.sets * self.each), seed).named["trailer"]
        return {"links": rows.detach().unflatten(0, (self.sets, self.each))}

    def parts(self, named: Mapping[str, torch.Tensor]) -> Parts:
        """For a student; shares the tensors."""
        return Parts(soft=named["links"].flatten(0, 1))


@dataclass(eq=False, slots=True)
class LinkStudent:
    """What serving does, with gradients to the links alone.

    Attributes:
        prefix: ids that documents are encoded behind.
    """

    model: LanguageModel
    shape: LinkShape
    prefix: tuple[int, ...] = ()
    _openings: dict[tuple[int, ...], CompiledSegment] = field(default_factory=dict, repr=False)

    def read(
        self,
        parts: Parts,
        lessons: Sequence[Lesson],
        branches: Sequence[Branches],
        hidden: bool = False,
        orders: Sequence[Sequence[int]] | None = None,
    ) -> list[Read]:
        """As `Student.read`."""
        return [
            self._one(parts, each, branches[n], hidden, orders[n] if orders else None) for n, each in enumerate(lessons)
        ]

    def learn(
        self,
        parts: Parts,
        lessons: Sequence[Lesson],
        branches: Sequence[Branches],
        loss: Callable[[int, Read], torch.Tensor],
        hidden: bool = False,
        orders: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """As `Student.learn`; there is nothing to ask of the writer."""
        for n, each in enumerate(lessons):
            loss(n, self._one(parts, each, branches[n], hidden, orders[n] if orders else None)).backward()

    def _one(self, parts: Parts, lesson: Lesson, branches: Branches, hidden: bool, order: Sequence[int] | None) -> Read:
        documents = [lesson.documents[i] for i in order or range(len(lesson.documents))]
        runs = [Run(lesson.opening)] if lesson.opening else []
        placed = {0: self._opening(lesson.opening)} if runs else {}
        segments = dict(Isolated(self.prefix).compile(self.model, documents))
        links = []
        for n, ids in enumerate(documents):
            placed[len(runs)] = segments[n]
            links.append(len(runs) + 1)
            runs += [Run(ids), Run(link_ids(self.shape.sets, self.shape.each, n))]
        placement = place_runs(runs)
        slots, behind = joined([placement.span(i) for i in links]), placement.tokens
        ahead = behind + branches.common
        plan = side_by_side(branches.lengths, ahead, torch.cat((slots, torch.arange(behind, ahead))))
        rows = torch.cat((torch.tensor(placement.ids)[slots][None], branches.ids), 1)
        cache = assemble(self.model, placement, placed, plan.filled)
        try:
            pairs = zip(cache.slot_keys[:, :, :, : plan.filled], cache.slot_values[:, :, :, : plan.filled], strict=True)
            found = read(self.model, rows, plan, list(pairs), branches.tail + len(slots), parts=parts, hidden=hidden)
        finally:
            self.model.pool.release(cache)
        # the teacher has no links
        return Read(found.logits, [[branch[len(slots) :] for branch in layer] for layer in found.hidden])

    def _opening(self, ids: tuple[int, ...]) -> CompiledSegment:
        if ids not in self._openings:
            [(_, self._openings[ids])] = Isolated().compile(self.model, [ids])
        return self._openings[ids]
