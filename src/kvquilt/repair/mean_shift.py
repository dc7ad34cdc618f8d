from __future__ import annotations

from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.model.rope import Angles, RotaryTable, turned
from kvquilt.model.rows import Pair, RowPlan, SlotView, Watcher
from kvquilt.repair.scene import Scene


@dataclass(frozen=True, slots=True)
class MeanShift:
    """Rows of a document that are not computed move by the mean change of those that are (AgentKVShift, 2607.21604).

    At every layer behind the first, per document and key-value head: the mean of fresh minus stored over its computed
    rows is added to all its others. Values are added as they are. Keys are compared and moved without their rotation,
    since the same change of a key reads differently at every position. Exact documents are left alone, and so is a
    document of which no row is computed. It costs no token-layer; the computed rows are the selector's and charged.
    """

    @property
    def alters_exact(self) -> bool:
        return False

    def reaches(self, computed: int) -> bool:
        return computed > 0

    def view(self, scene: Scene, view: SlotView | None) -> SlotView | None:
        return view

    def watcher(self, scene: Scene, chosen: torch.Tensor) -> Watcher | None:
        return _Shift(scene) if len(chosen) and scene.spans else None


class _Shift(Watcher):
    """`of`: ``[slots]`` int64, the number of the spendable document that a slot lies in, -1 for none."""

    def __init__(self, scene: Scene) -> None:
        self._tables = scene.model.capability.tables
        self._documents = len(scene.spans)
        self._of = torch.full((scene.placement.tokens,), -1)
        for number, span in enumerate(scene.spans):
            self._of[span.start : span.stop] = number
        self._angles: dict[int, Angles] = {}

    def writes(self, layer: int, plan: RowPlan, slots: Pair, fresh: Pair) -> None:
        if plan.filled != len(self._of):
            raise InputError("correction", "a mean shift needs all rows of the prompt, and some were dropped")
        if layer == 0:  # keys and values there depend on the token alone: what differs is rounding
            return
        rows = plan.current.slots
        number = self._of[rows]
        inside = (number >= 0).nonzero()[:, 0]
        computed, number = rows[inside], number[inside]
        counts = torch.bincount(number, minlength=self._documents)
        others = self._of >= 0
        others[computed] = False
        others &= counts[self._of] > 0
        moved = others.nonzero()[:, 0]
        if not len(moved):
            return
        table = self._tables[layer]
        angles = None if table is None else self._of_table(table, plan)
        for part, (stored, new) in enumerate(zip(slots, fresh, strict=True)):
            device, turns = stored.device, angles if part == 0 else None
            change = new[:, :, inside.to(device)].float() - stored[:, :, computed.to(device)].float()
            if turns is not None:
                change = turned(change, turns.at(computed), back=True)
            mean = change.new_zeros(*change.shape[:2], self._documents, change.shape[-1])
            mean.index_add_(2, number.to(device), change)
            mean /= counts.clamp(min=1).to(device)[:, None]
            shift = mean[:, :, self._of[moved].to(device)]
            if turns is not None:
                shift = turned(shift, turns.at(moved))
            where = moved.to(device)
            stored[:, :, where] = (stored[:, :, where].float() + shift).to(stored.dtype)

    def _of_table(self, table: RotaryTable, plan: RowPlan) -> Angles:
        """Angles of all slots; layers of one type share a table."""
        if id(table) not in self._angles:
            slots = torch.arange(plan.filled)
            positions = slots + plan.offset if plan.view is None else plan.view.at(slots)
            self._angles[id(table)] = table.angles(positions)
        return self._angles[id(table)]
