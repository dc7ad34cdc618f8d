"""Sequences side by side in one row of a batch: none is padded, and what stands in front of all of them is there once.

    slots        0 1 2 3 4 5    6 7 8     9 10      six in front, of which 4 and 5 are rows too; lengths 3 and 2
                 in front       sequence  sequence
    positions    0 1 2 3 4 5    6 7 8     6 7

A row sees what is in front of all, and its own sequence, up to itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from kvquilt.model.rows import FOLDED_ROWS, Block, RowPlan, Rows

_ALL = -1  # a slot that every sequence sees


@dataclass(eq=False, slots=True)
class Packed(RowPlan):
    """The rows of several sequences; `side_by_side` makes one.

    Attributes:
        lengths: rows of each sequence.
        layout: ``[keys]`` int64, the slot of every key that attention is given; None where they are the slots. It
            repeats what is in front before every sequence.
    """

    lengths: tuple[int, ...] = ()
    layout: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.current = self._all = _PackedRows(self.rows, self)

    @property
    def ahead(self) -> int:
        """Slots in front of all sequences."""
        return self.filled - sum(self.lengths)

    @property
    def common(self) -> int:
        """Rows in front of all sequences."""
        return len(self.rows) - sum(self.lengths)

    @property
    def standing(self) -> torch.Tensor:
        """``[filled]`` int64, logical position of every slot."""
        own = [torch.arange(self.ahead, self.ahead + length) for length in self.lengths]
        return torch.cat([torch.arange(self.ahead), *own])

    @property
    def positions(self) -> torch.Tensor:
        return self.standing[self.rows]

    def rows_of(self, sequence: int) -> torch.Tensor:
        """Indices into `rows`: those in front and the sequence's own."""
        first = self.common + sum(self.lengths[:sequence])
        return torch.cat((torch.arange(self.common), torch.arange(first, first + self.lengths[sequence])))

    def count_pairs(self, window: int | None) -> None:
        seen = self.positions + 1
        self.pairs += int((seen if window is None else seen.clamp(max=window)).sum())


def side_by_side(
    lengths: tuple[int, ...],
    ahead: int,
    front: torch.Tensor | None = None,
    *,
    repeat: bool = False,
    until: int | None = None,
) -> Packed:
    """The plan of sequences behind `ahead` slots.

    Args:
        front: ``[n]`` int64 ascending, those of the slots in front that are rows of this forward, too.
        repeat: give attention what is in front before every sequence, so that none scans the earlier ones: for many
            short sequences behind little. Without, keys are not copied.
    """
    filled = ahead + sum(lengths)
    layout = None
    if repeat and ahead:
        firsts = accumulate(lengths, initial=ahead)
        own = [torch.arange(first, first + n) for first, n in zip(firsts, lengths, strict=False)]
        layout = torch.cat([torch.arange(ahead), *(torch.cat((torch.arange(ahead), each)) for each in own)])
    rows = torch.arange(ahead, filled)
    rows = rows if front is None else torch.cat((front, rows))
    return Packed(rows, filled, until=until, lengths=lengths, layout=layout)


class _PackedRows(Rows):
    """Blocks end where sequences do."""

    plan: Packed

    @property
    def is_prefill(self) -> bool:
        return False

    def blocks(self, layer: int, window: int | None, group: int, like: torch.Tensor) -> list[Block]:
        key = (window, group, like.dtype, like.device)
        if key not in self._blocks:
            plan = self.plan
            counts = torch.tensor([plan.ahead, *plan.lengths])
            of = torch.repeat_interleave(torch.arange(_ALL, len(plan.lengths)), counts)
            slots = torch.stack((of, plan.standing))
            own, keys = slots[:, self.slots], slots if plan.layout is None else slots[:, plan.layout]
            self._blocks[key] = [
                Block(first, last, low, high, _mask(own[:, first:last], keys[:, low:high], window, group, like))
                for first, last, low, high in self._spans()
            ]
        return self._blocks[key]

    def _spans(self) -> Iterator[tuple[int, int, int, int]]:
        """Rows ``first:last``, and the keys ``low:high`` that all they see is among."""
        ahead, common, spread = self.plan.ahead, self.plan.common, self.plan.layout is not None
        for first, last in _portions(common):
            yield first, last, 0, int(self.slots[last - 1]) + 1
        row, key = common, ahead
        for length in self.plan.lengths:
            low = 0 if ahead and not spread else key
            key += ahead if spread else 0
            for first, last in _portions(length):
                yield row + first, row + last, low, key + last
            row, key = row + length, key + length


def _portions(count: int) -> Iterator[tuple[int, int]]:
    """As many rows at a time as are folded."""
    for first in range(0, count, FOLDED_ROWS):
        yield first, min(count, first + FOLDED_ROWS)


def _mask(own: torch.Tensor, keys: torch.Tensor, window: int | None, group: int, like: torch.Tensor) -> torch.Tensor:
    """Folded, as `Block` says. Rows and keys: ``[2, n]``, sequence and position."""
    (sequence, at), (of, standing) = own[:, :, None], keys
    hidden = (of != _ALL) & (of != sequence) | (standing > at)
    if window is not None:
        hidden |= at - standing >= window
    mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, torch.finfo(like.dtype).min)
    return mask.repeat(group, 1).to(like.device)
