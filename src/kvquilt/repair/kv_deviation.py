from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from kvquilt.errors import InputError
from kvquilt.model.rows import Pair, RowPlan, Watcher
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe

_CHECK = 1  # the first layer whose keys and values depend on the text before a row
_PARTS = {"keys": (0,), "values": (1,), "both": (0, 1)}


@dataclass(frozen=True, slots=True)
class KVDeviation:
    """Rows whose keys and values change most at layer 1 once they see the text before them (CacheBlend, 2405.16444).

    All spendable and all inline rows pass layer 0 and the projections of layer 1; the score of a row is the squared
    difference to what is stored, summed over heads and dimensions. The pass goes on from there, so that nobody passes
    layer 0 twice; layers 0 and 1 stay fresh for all rows, as in the published release. In a model of one layer nothing
    deviates, and rows rank by their slot.

    Attributes:
        of: what is compared: ``values`` as the release does, ``keys`` (rotated for one and the same position), or
            ``both``.
        gradual: how much the number of rows falls with depth, from ``1 + gradual`` to ``1 - gradual`` times its mean;
            every layer keeps those of its rows that deviate most there. The paper filters so; 0: one set of rows.
    """

    of: Literal["values", "keys", "both"] = "values"
    gradual: float = 0.0
    probe: Probe = Probe.LAYER_1
    granularity: Granularity = Granularity.TOKEN

    def __post_init__(self) -> None:
        if self.of not in _PARTS:
            raise InputError("of", "must be values, keys or both", self.of)
        if not 0 <= self.gradual <= 1:
            raise InputError("gradual", "must be between 0 and 1", self.gradual)

    def least(self, scene: Scene) -> int:
        if not scene.tokens or scene.layers <= _CHECK:
            return 0
        resumed = len(scene.inline_slots) * _CHECK
        return scene.probe_charge(len(_rows(scene)), _CHECK) - resumed

    def choose(self, scene: Scene) -> Choice:
        if not scene.tokens or scene.layers <= _CHECK:
            return Choice(scene.slots)
        rows, check = _rows(scene), _Check(self.of, scene.slots)
        scene.probe(rows, check, until=_CHECK, queries=False)
        ranking = scene.ranked(check.scores)
        narrow = partial(_Filter, self.of, ranking, scene.inline_slots) if self.gradual else None
        return Choice(
            ranking, first=_CHECK, entering=(rows, check.entering), decline=float(self.gradual), narrow=narrow
        )


def deviation(of: str, slots: torch.Tensor, at: torch.Tensor, stored: Pair, fresh: Pair) -> torch.Tensor:
    """Squared difference of `slots` (``[R]`` int64), fresh less stored, summed over heads and dimensions.

    Args:
        at: ``[R]``, where their rows stand among the fresh ones.
        stored: keys and values of all slots; fresh: of the rows just computed. Both as `Watcher.writes` is given them.

    Returns:
        ``[R]`` fp32 on the CPU.
    """
    slots, at = slots.to(fresh[0].device), at.to(fresh[0].device)
    total = torch.zeros(len(slots), device=fresh[0].device)
    for part in _PARTS[of]:
        for head in range(fresh[part].shape[1]):  # one by one: in fp32, all at once are as large as the layer
            change = fresh[part][0, head, at].float() - stored[part][0, head, slots].float()
            total.add_(change.square().sum(-1))
    return total.cpu()


def _rows(scene: Scene) -> torch.Tensor:
    """``[R]`` int64 ascending: a prompt that ends with a document has a row that is spendable and inline."""
    rows: torch.Tensor = torch.cat((scene.slots, scene.inline_slots)).unique()
    return rows


class _Check(Watcher):
    """The probe: scores of `slots` and the hidden states of all rows, both where the pass will go on."""

    def __init__(self, of: str, slots: torch.Tensor) -> None:
        self._of, self._slots = of, slots
        self._scores: list[torch.Tensor] = []
        self._entering: list[torch.Tensor] = []

    @property
    def scores(self) -> torch.Tensor:
        return torch.cat(self._scores)

    @property
    def entering(self) -> torch.Tensor:
        return torch.cat(self._entering)

    def enters(self, layer: int, plan: RowPlan, hidden: torch.Tensor) -> None:
        if layer == _CHECK:
            self._entering.append(hidden[0])

    def writes(self, layer: int, plan: RowPlan, slots: Pair, fresh: Pair) -> None:
        if layer == _CHECK:
            mine = self._slots[torch.isin(self._slots, plan.rows)]
            self._scores.append(deviation(self._of, mine, torch.searchsorted(plan.rows, mine), slots, fresh))


class _Filter(Watcher):
    """Gradual filtering: what deviates most in a layer goes on to the next one."""

    def __init__(self, of: str, ranking: torch.Tensor, inline: torch.Tensor, counts: dict[int, int]) -> None:
        self._of, self._ranking, self._inline, self._counts = of, ranking, inline, counts

    def writes(self, layer: int, plan: RowPlan, slots: Pair, fresh: Pair) -> None:
        if layer + 1 not in self._counts:
            return
        here, count = plan.current.slots, self._counts[layer + 1]
        if layer == _CHECK:  # its slots have been fresh since the probe, which has ranked them
            going = self._ranking[:count]
        else:
            at = (~torch.isin(here, self._inline)).nonzero()[:, 0]
            scores = deviation(self._of, here[at], at, slots, fresh)
            going = here[at[scores.argsort(descending=True, stable=True)[:count]]]
        plan.active[layer + 1] = torch.searchsorted(plan.rows, torch.cat((self._inline, going)).unique())
