"""Which exercises a step takes, in which order their documents stand, and how far it goes: by seed and step alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvquilt.training.config import TrainConfig
from kvquilt.training.lesson import Lesson


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every epoch takes all `count` exercises once, shuffled; its last step takes what is left."""

    config: TrainConfig
    count: int

    @property
    def per_epoch(self) -> int:
        return math.ceil(self.count / self.config.batch)

    @property
    def steps(self) -> int:
        most = self.config.epochs * self.per_epoch
        return most if self.config.steps is None else min(most, self.config.steps)

    def chosen(self, step: int) -> list[int]:
        """Indices of the exercises of a step, counted from 0."""
        epoch, at = divmod(step, self.per_epoch)
        order = random.Random(f"{self.config.seed} epoch {epoch}").sample(range(self.count), self.count)
        return order[at * self.config.batch : (at + 1) * self.config.batch]

    def orders(self, step: int, lessons: Sequence[Lesson]) -> list[list[int]]:
        """In which order the student sees each lesson's documents."""
        draw = random.Random(f"{self.config.seed} order {step}")
        ordered = [list(range(len(each.documents))) for each in lessons]
        if self.config.shuffle:
            for each in ordered:
                draw.shuffle(each)
        return ordered

    def falls(self, step: int) -> float:
        """What the learning rates are multiplied by: linear from 1 to 0."""
        return 1 - step / self.steps
