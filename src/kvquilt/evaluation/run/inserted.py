"""Rows as they should be, in place of what is stored: what a perfect cache of some documents would give."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvquilt.model.rows import SlotView, Watcher
from kvquilt.repair.operator import repair
from kvquilt.repair.scene import Scene


@dataclass(frozen=True, slots=True)
class Inserted:
    """Full prefill's own keys and values in the slots of the documents that the placement ranks, all layers.

    What no cache could hold: they are computed for this prompt, beside it, and nothing of that is charged or counted,
    so the arm's work and time mean nothing (`Arm.has_a_cost`). The ledger goes on to call these documents reused.
    """

    @property
    def alters_exact(self) -> bool:
        return False

    def reaches(self, computed: int) -> bool:
        return False

    def view(self, scene: Scene, view: SlotView | None) -> SlotView | None:
        """Writes the slots: the pass that follows sees them. `view` itself."""
        placement, model, placed = scene.placement, scene.model, scene.placed
        spans = [placement.span(i) for i in placement.ranking]
        if not spans:
            return view
        whole = model.pool.acquire(placement.tokens)
        try:
            repair(model, whole, placement.ids, [range(placement.tokens)])
            with torch.inference_mode():
                for span in spans:
                    for mine, theirs in ((placed.slot_keys, whole.slot_keys), (placed.slot_values, whole.slot_values)):
                        mine[:, :, :, span.start : span.stop] = theirs[:, :, :, span.start : span.stop]
        finally:
            model.pool.release(whole)
        return view

    def watcher(self, scene: Scene, chosen: torch.Tensor) -> Watcher | None:
        return None
