from __future__ import annotations

from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.repair.question_attention import QuestionAttention
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Blocks that the question attends to are computed again, others dropped from attention (SamKV, arXiv 2508.11661).

    The question passes the model while it sees, of each document, only the first and the last blocks; a block's score
    is the attention that its keys receive, summed. Blocks are counted from their document's start, so a last one may be
    short. How many are kept is up to the budget, whose last block may be kept in part. Which layers the authors score
    is unknown.

    Attributes:
        block: tokens of a block.
        initial: first blocks of each document that rank before all others; `local`: likewise last ones.
        layers: those whose scores are averaged, from the end where negative; empty for all.
    """

    block: int = 16
    initial: int = 1
    local: int = 1
    layers: tuple[int, ...] = ()
    probe: Probe = Probe.QUESTION
    granularity: Granularity = Granularity.BLOCK

    def __post_init__(self) -> None:
        for field, least in (("block", 1), ("initial", 0), ("local", 0)):
            if getattr(self, field) < least:
                raise InputError(field, f"must be at least {least}", getattr(self, field))

    def least(self, scene: Scene) -> int:
        return self._question.least(scene)

    def choose(self, scene: Scene) -> Choice:
        if not scene.tokens:
            return Choice(scene.slots, drop_rest=True)
        blocks, outer = self._blocks(scene)
        visible = torch.ones(scene.placement.tokens, dtype=torch.bool)
        visible[scene.slots] = outer[blocks]
        visible[scene.inline_slots] = True
        totals = torch.zeros(len(outer)).index_add_(0, blocks, self._question.scores(scene, visible))
        order = totals.argsort(descending=True, stable=True)
        order = order[outer[order].int().argsort(descending=True, stable=True)]
        return Choice(scene.slots[order.argsort()[blocks].argsort(stable=True)], drop_rest=True)

    @property
    def _question(self) -> QuestionAttention:
        return QuestionAttention(layers=self.layers)

    def _blocks(self, scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every spendable row the number of its block, ``[tokens]`` int64; of every block whether it is one of its
        document's first or last, bool."""
        numbers, outer, before = [], [], 0
        for span in scene.spans:
            block = min(self.block, len(span))
            within = torch.arange(len(span)) // block
            count = -(-len(span) // block)
            number = torch.arange(count)
            numbers.append(within + before)
            outer.append((number < min(self.initial, count)) | (number >= count - min(self.local, count)))
            before += count
        return torch.cat(numbers), torch.cat(outer)
