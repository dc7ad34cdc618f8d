from __future__ import annotations

from dataclasses import dataclass

from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe


@dataclass(frozen=True, slots=True)
class Nothing:
    """No document row: pure reuse."""

    probe: Probe = Probe.NONE
    granularity: Granularity = Granularity.DOCUMENT

    def least(self, scene: Scene) -> int:
        return 0

    def choose(self, scene: Scene) -> Choice:
        return Choice(scene.slots[:0])
