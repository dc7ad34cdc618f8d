from __future__ import annotations

from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens of every document, which became sinks when it was encoded alone (EPIC, arXiv 2410.15332).

    The ranking takes turns: the first token of every document, then the second of every one, so that a small budget is
    shared by all of them. Choosing costs nothing.

    Attributes:
        k: tokens of each document; a shorter one is ranked whole.
    """

    k: int = 16
    probe: Probe = Probe.NONE
    granularity: Granularity = Granularity.RUN

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError("k", "must be at least 1", self.k)

    def least(self, scene: Scene) -> int:
        return 0

    def choose(self, scene: Scene) -> Choice:
        heads = [torch.arange(span.start, min(span.stop, span.start + self.k)) for span in scene.spans]
        slots = torch.cat([scene.slots[:0], *heads])
        depth = torch.cat([scene.slots[:0], *(torch.arange(len(head)) for head in heads)])
        return Choice(slots[depth.argsort(stable=True)])
