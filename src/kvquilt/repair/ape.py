from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.model.rows import SlotView, Watcher
from kvquilt.repair.scene import Scene


@dataclass(frozen=True, slots=True)
class Tempered:
    """Attention to documents sharpened and scaled, so that many encoded side by side weigh like one (APE, 2502.05431).

    Every row that is computed, in this prompt and behind it, attends in two parts: to the documents with logits divided
    by the temperature, and to everything else plainly. The parts are merged by their log-sum-exp, the documents' times
    ``scale * temperature``. Both at 1 change nothing. The paper also places the documents side by side: the order
    `shared_positions`.

    Attributes:
        temperature, scale: above 0; the paper's code has 0.9 for both, and answers depend on them.
    """

    temperature: float = 0.9
    scale: float = 0.9

    def __post_init__(self) -> None:
        for field in ("temperature", "scale"):
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise InputError(field, "must be a finite number above 0", value)

    @property
    def alters_exact(self) -> bool:
        return True

    def reaches(self, computed: int) -> bool:
        return True

    def view(self, scene: Scene, view: SlotView | None) -> SlotView | None:
        """`view` with all documents marked, exact ones too.

        Raises:
            InputError: rows were dropped from attention, so slots are not the prompt's any more.
        """
        tokens, documents = scene.placement.tokens, scene.placement.documents()
        if view is not None and len(view.positions) != tokens:
            raise InputError("correction", "tempered attention needs all rows of the prompt, and some were dropped")
        if not documents:
            return view
        marked = torch.zeros(tokens, dtype=torch.bool)
        for span in map(scene.placement.extent, documents):
            marked[span.start : span.stop] = True
        positions, shift = (torch.arange(tokens), 0) if view is None else (view.positions, view.shift)
        return SlotView(positions, shift, marked, self.temperature, self.scale)

    def watcher(self, scene: Scene, chosen: torch.Tensor) -> Watcher | None:
        return None
