"""What every correction promises: changes to placed segments that need no forward pass of their own."""

from __future__ import annotations

from typing import Protocol

import torch

from kvquilt.model.rows import SlotView, Watcher
from kvquilt.repair.scene import Scene


class Correction(Protocol):
    """A frozen dataclass in a file of its own whose fields are its settings."""

    @property
    def alters_exact(self) -> bool:
        """Whether documents that stand where they were encoded are corrected too, and so are exact no longer."""
        ...

    def reaches(self, computed: int) -> bool:
        """Whether it changes a document of which so many rows are computed, and not all."""
        ...

    def view(self, scene: Scene, view: SlotView | None) -> SlotView | None:
        """How the slots are attended to, for the prompt and every token after it; `view` itself for no change."""
        ...

    def watcher(self, scene: Scene, chosen: torch.Tensor) -> Watcher | None:
        """What changes slots of rows that are not computed while the pass over `chosen` goes; None for nothing."""
        ...
