from __future__ import annotations

from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe


@dataclass(frozen=True, slots=True)
class Random:
    """All rows in random order: what every other selector has to beat at the same budget.

    A larger budget keeps what a smaller one chose.

    Attributes:
        seed: same seed and same number of rows, same order.
    """

    seed: int = 0
    probe: Probe = Probe.NONE
    granularity: Granularity = Granularity.TOKEN

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise InputError("seed", "must be a whole number from 0 that fits 63 bits", self.seed)

    def least(self, scene: Scene) -> int:
        return 0

    def choose(self, scene: Scene) -> Choice:
        slots = scene.slots
        order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(self.seed))
        return Choice(slots[order])
