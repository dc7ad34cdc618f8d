from __future__ import annotations

from dataclasses import dataclass

import torch

from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe


@dataclass(frozen=True, slots=True)
class Spread:
    """Rows spread evenly over every document, whatever they hold.

    Every document gets its first row before any gets a second, and from then on a share of the rows that is its share
    of the tokens. Inside a document the next row always halves one of the widest gaps, so the gaps left by any budget
    differ by a factor of two at most, up to rounding, and a larger budget keeps what a smaller one chose.
    """

    probe: Probe = Probe.NONE
    granularity: Granularity = Granularity.TOKEN

    def least(self, scene: Scene) -> int:
        return 0

    def choose(self, scene: Scene) -> Choice:
        spans = [span for span in scene.spans if len(span)]
        slots = torch.cat([scene.slots[:0], *(span.start + halving(len(span)) for span in spans)])
        turn = torch.cat([scene.slots[:0].double(), *(torch.arange(len(s)).double() / len(s) for s in spans)])
        return Choice(slots[turn.argsort(stable=True)])


def halving(count: int) -> torch.Tensor:
    """``[count]`` int64, at least one: 0 to count - 1 so that every head is spread evenly (van der Corput, base 2)."""
    bits = (count - 1).bit_length()
    numbers = torch.arange(1 << bits)
    turned = torch.zeros_like(numbers)
    for bit in range(bits):
        turned |= ((numbers >> bit) & 1) << (bits - 1 - bit)
    scaled = turned * count >> bits
    # at least as many numbers as places: every place is hit, and its first hit counts
    first = torch.full((count,), len(numbers)).scatter_reduce(0, scaled, numbers, "amin")
    return first.argsort()
