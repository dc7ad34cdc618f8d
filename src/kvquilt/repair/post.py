"""Post-processors: they reshape chosen rows before the budget is charged, and compose in any order.

Each takes ranked spendable slots and gives ranked spendable slots, each at most once, and never reaches from one
document into the next. A longer head gives the same rows followed by more: that is what makes them compose, and what
the search for the longest head that fits a budget relies on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.repair.scene import Scene

_PIECE = 1 << 16  # rows with their windows that are looked at at a time


@dataclass(frozen=True, slots=True)
class Expand:
    """Every chosen row with its neighbours, the nearer ones first.

    Attributes:
        window: rows on each side.
    """

    window: int

    def __post_init__(self) -> None:
        _whole("expand", self.window, 0)

    def apply(self, head: torch.Tensor, scene: Scene) -> torch.Tensor:
        window, of = min(self.window, _longest(scene)), _documents(scene)
        steps = torch.arange(window + 1).repeat_interleave(2)[1:]  # 0, 1, 1, 2, 2, ...
        steps[1::2] *= -1
        out, left = [head[:0]], torch.isin(of, of[head])
        for rows in head.split(max(1, _PIECE // len(steps))):
            if not bool(left.any()):  # no document of the head has a row to give
                break
            around = rows[:, None] + steps
            inside = (around >= 0) & (around < len(of))
            same = of[around.clamp(0, len(of) - 1)] == of[rows][:, None]
            new = _once(around[inside & same], len(of))
            new = new[left[new]]
            left[new] = False
            out.append(new)
        return torch.cat(out)


@dataclass(frozen=True, slots=True)
class RoundToBlock:
    """Every chosen row with all rows of its block.

    Attributes:
        block: rows of a block, counted from each document's first; a document's last block may be shorter.
    """

    block: int

    def __post_init__(self) -> None:
        _whole("round_to_block", self.block, 1)

    def apply(self, head: torch.Tensor, scene: Scene) -> torch.Tensor:
        of, starts, block = _documents(scene), _starts(scene), min(self.block, max(1, _longest(scene)))
        begin = starts[of[head]]
        blocks = _once(begin + (head - begin) // block * block, len(of))
        rows = blocks[:, None] + torch.arange(block)
        inside = rows < len(of)
        return rows[inside & (of[rows.clamp(max=len(of) - 1)] == of[blocks][:, None])]


@dataclass(frozen=True, slots=True)
class MergeGap:
    """Chosen rows, and the rows between two of them where not many are: fewer, longer runs.

    Attributes:
        gap: the longest gap that is filled; it is ranked behind the row that closes it.
    """

    gap: int

    def __post_init__(self) -> None:
        _whole("merge_gap", self.gap, 0)

    def apply(self, head: torch.Tensor, scene: Scene) -> torch.Tensor:
        of, spans = _documents(scene).tolist(), scene.spans
        taken = [False] * len(of)
        out: list[int] = []
        for slot in head.tolist():
            if taken[slot]:
                continue
            taken[slot] = True
            out.append(slot)
            span = spans[of[slot]]
            for step, end in ((-1, max(span.start, slot - self.gap - 1) - 1), (1, min(span.stop, slot + self.gap + 2))):
                other = next((s for s in range(slot + step, end, step) if taken[s]), None)
                for between in () if other is None else range(slot + step, other, step):
                    taken[between] = True
                    out.append(between)
        return head.new_tensor(out)


@dataclass(frozen=True, slots=True)
class CapRuns:
    """Chosen rows as long as they make few runs of neighbours: the best-ranked begin runs, others must join one.

    A row that finds no place waits; it is taken as soon as it touches a run, or two runs have grown together.

    Attributes:
        runs: how many.
    """

    runs: int

    def __post_init__(self) -> None:
        _whole("cap_runs", self.runs, 1)

    def apply(self, head: torch.Tensor, scene: Scene) -> torch.Tensor:
        of = _documents(scene).tolist()
        taken, out, held = [False] * len(of), list[int](), 0
        waiting: dict[int, None] = {}  # in ranked order

        def beside(slot: int) -> list[int]:
            return [s for s in (slot - 1, slot + 1) if 0 <= s < len(of) and of[s] == of[slot]]

        for slot in head.tolist():
            waiting[slot] = None
            ready = [slot]
            while ready:
                now = ready.pop()
                touched = sum(taken[s] for s in beside(now))
                if now not in waiting or (touched == 0 and held == self.runs):
                    continue
                del waiting[now]
                taken[now] = True
                out.append(now)
                held += 1 - touched
                ready += [s for s in beside(now) if s in waiting]
                if not ready and held < self.runs and waiting:
                    ready.append(next(iter(waiting)))
        return head.new_tensor(out)


@dataclass(frozen=True, slots=True)
class Quota:
    """At most a share of every document's rows, its best-ranked; rounded down.

    Attributes:
        share: above 0, up to 1.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:  # NaN fails too
            raise InputError("quota", "a share of each document's rows, above 0 and up to 1", self.share)

    def apply(self, head: torch.Tensor, scene: Scene) -> torch.Tensor:
        of = _documents(scene)[head]
        kept = torch.zeros(len(head), dtype=torch.bool)
        for number, span in enumerate(scene.spans):
            # as in `Budget.allows`: 0.07 of 100 is 7
            kept[(of == number).nonzero()[: math.floor(self.share * len(span) + 1e-9), 0]] = True
        return head[kept]


def _documents(scene: Scene) -> torch.Tensor:
    """``[slots]`` int64: which of the scene's spans a slot lies in; -1 for none."""
    out = torch.full((scene.placement.tokens,), -1)
    for number, span in enumerate(scene.spans):
        out[span.start : span.stop] = number
    return out


def _longest(scene: Scene) -> int:
    """Rows of the longest span: no setting reaches farther, however large it is written."""
    return max(map(len, scene.spans), default=0)


def _starts(scene: Scene) -> torch.Tensor:
    """``[spans]`` int64."""
    return torch.tensor([span.start for span in scene.spans], dtype=torch.int64)


def _once(slots: torch.Tensor, count: int) -> torch.Tensor:
    """The same below `count` without what came before."""
    places = torch.arange(len(slots))
    first = torch.full((count,), len(slots)).scatter_reduce(0, slots, places, "amin")
    return slots[first[slots] == places]


def _whole(field: str, number: float, least: int) -> None:
    if not isinstance(number, int) or number < least:
        raise InputError(field, f"must be a whole number from {least}", number)
