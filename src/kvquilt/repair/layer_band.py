from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvquilt.errors import InputError
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe


@dataclass(frozen=True, slots=True)
class LayerBand:
    """All rows through some of the layers (DroidSpeak, arXiv 2411.02820); elsewhere stored keys and values stay.

    A band that begins at layer 0 starts from the embedding. One that begins deeper starts from the hidden states that
    the writer noted there, and skips the layers before; they are as old as the stored keys. A prompt's last row passes
    every layer all the same, also where a document ends the prompt.

    Attributes:
        first: the band's first layer.
        last: the first layer behind it; 0 for half of the model's layers, rounded up.
    """

    first: int = 0
    last: int = 0
    probe: Probe = field(init=False, default=Probe.NONE)
    granularity: Granularity = Granularity.DOCUMENT

    def __post_init__(self) -> None:
        if self.first < 0:
            raise InputError("first", "must be a layer's number, from 0", self.first)
        if self.last and self.last <= self.first:
            raise InputError("last", f"must lie behind the band's first layer, {self.first}", self.last)
        object.__setattr__(self, "probe", Probe.OFFLINE if self.first else Probe.NONE)

    @property
    def side(self) -> str:
        """Name of the side data it needs; "" for none."""
        return f"residual-{self.first}" if self.first else ""

    def least(self, scene: Scene) -> int:
        return 0

    def choose(self, scene: Scene) -> Choice:
        """Rows in the prompt's order.

        Raises:
            InputError: the model has fewer layers, or a stored segment lacks the side data.
        """
        last = self.last or -(-scene.layers // 2)
        if not self.first < last <= scene.layers:
            raise InputError("last", f"the band {self.first}:{last} is none of this model's {scene.layers} layers")
        end = None if last == scene.layers else last
        slots = scene.slots
        if not self.first or not len(slots):
            return Choice(slots, self.first, end)
        states = torch.cat([self._states(scene, i) for i in scene.spendable])
        # rows that are computed in any case pass every layer, from the embedding on
        stale = ~torch.isin(slots, scene.inline_slots)
        return Choice(slots, self.first, end, entering=(slots[stale], states[stale]) if bool(stale.any()) else None)

    def _states(self, scene: Scene, run: int) -> torch.Tensor:
        """``[tokens, width]``, what enters layer `first` of one document."""
        states = scene.segments[run].side.get(self.side)
        if states is None:
            raise InputError("writer", f"a band from layer {self.first} needs segments with {self.side}", "none stored")
        return states
