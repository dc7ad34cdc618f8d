"""Training link tokens (KVLink, arXiv 2502.16002): documents are as the isolated writer stores them; the frozen model
reads the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

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
from kvquilt.training.begun import Begun
from kvquilt.training.lesson import Lesson
from kvquilt.training.shape import soft_rows
from kvquilt.training.teacher import Branches
from kvquilt.training.trainable import Orders
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.link_tokens import LinkTokens, link_ids


@dataclass(frozen=True, slots=True)
class LinkShape:
    """How many link tokens there are. A `Trainable`.

    Attributes:
        links: behind every document.
        link_sets: 1 shares them among all documents; otherwise every place in a prompt has its own, up to so many.
    """

    links: int = 5
    link_sets: int = 1

    def __post_init__(self) -> None:
        if min(self.links, self.link_sets) < 1:
            raise InputError("links", "links and sets are at least 1", f"{self}")

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("links",)

    @property
    def plain(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        return self.links

    def kind_of(self, name: str) -> str:
        return name

    def soft(self, name: str) -> bool:
        return True

    def sized(self, start: Begun) -> LinkShape:
        if "links" not in start.named:
            return self
        sets, each, _ = start.named["links"].shape
        return LinkShape(each, sets)

    def drawn(self, model: LanguageModel, seed: int) -> dict[str, torch.Tensor]:
        """``links`` ``[sets, each, width]``, drawn like a token's embedding."""
        drawn = soft_rows(model, {"links": self.link_sets * self.links}, torch.Generator().manual_seed(seed))
        return {"links": drawn["links"].unflatten(0, (self.link_sets, self.links))}

    def parts(self, named: Mapping[str, torch.Tensor]) -> Parts:
        return Parts(soft=named["links"].flatten(0, 1))

    def pupil(self, model: LanguageModel, prefix: tuple[int, ...], keep_all: bool) -> LinkStudent:
        return LinkStudent(model, self, prefix)

    def writer(
        self,
        kind: str,
        model: LanguageModel,
        named: Mapping[str, torch.Tensor],
        prefix: tuple[int, ...],
        base_name: str,
    ) -> LinkTokens:
        return LinkTokens.of(model.fingerprint, named["links"], prefix, base_name)


@dataclass(eq=False, slots=True)
class LinkStudent:
    """Reads as serving does, with gradients to the links alone. A `Pupil`.

    Attributes:
        prefix: ids that documents are encoded behind.
    """

    passes: ClassVar[int] = 1
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
        orders: Orders | None = None,
    ) -> list[Read]:
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
        orders: Orders | None = None,
    ) -> None:
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
            runs += [Run(ids), Run(link_ids(self.shape.link_sets, self.shape.links, n))]
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
