"""From a ranking and a budget to the rows of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvquilt.errors import InputError
from kvquilt.model.rows import RowPlan, SlotView, Watcher, Watchers
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice


class PostProcessor(Protocol):
    """Reshapes what was chosen, for instance into whole blocks, before it is charged."""

    def apply(self, head: torch.Tensor, scene: Scene) -> torch.Tensor:
        """Ranked spendable slots in, ranked spendable slots out, each at most once.

        A longer head gives the same slots followed by more, or no more.
        """
        ...


def cut(choice: Choice, post: Sequence[PostProcessor], scene: Scene, left: int | None) -> torch.Tensor:
    """The longest head of the ranking that, post-processed, costs at most `left` token-layers; all of it for None.

    Returns:
        ``[K]`` int64 slots, best first.

    Raises:
        InputError: post-processors of a choice whose rows become fewer with depth, by the ranking or by what it sees.
    """
    if post and choice.decline:
        raise InputError("post", "rows that become fewer with depth cannot be reshaped: no layer would keep the shape")
    last = scene.layers if choice.last is None else choice.last

    def fits(chosen: torch.Tensor) -> bool:
        return left is None or _cost(choice, chosen, last) <= left

    def processed(length: int) -> torch.Tensor:
        head = choice.ranking[:length]
        for each in post:
            head = each.apply(head, scene)
        return head

    low, high = 0, len(choice.ranking)
    while low < high:  # the largest head that fits, if longer heads never give fewer rows
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(processed(middle)) else (low, middle - 1)
    out = processed(low)
    while not fits(out):  # a post-processor that makes rows of none
        out = out[:-1]
    return out


def _cost(choice: Choice, chosen: torch.Tensor, last: int) -> int:
    """Token-layers of `chosen`: of the choice's own layers, and of those before for rows that do not resume there."""
    own = len(chosen) * (last - choice.first)
    if not choice.first:
        return own
    if choice.decline:
        chosen = choice.ranking[: max(counts_by_layer(choice, len(chosen), last).values(), default=0)]
    return own + (len(chosen) - choice.resuming(chosen)) * choice.first


def counts_by_layer(choice: Choice, rows: int, layers: int) -> dict[int, int]:
    """Document rows of each layer for a mean of `rows`: falling linearly with depth, never more than that in all.

    The first layer cannot have more rows than the ranking, so the nearer `rows` is to all of it, the less they fall.
    """
    last = layers if choice.last is None else choice.last
    depth, ranked = last - choice.first, len(choice.ranking)
    decline = min(choice.decline, ranked / rows - 1) if rows and depth > 1 else 0.0
    steps = max(1, depth - 1)
    return {choice.first + n: min(ranked, int(rows * (1 + decline * (1 - 2 * n / steps)) + 1e-9)) for n in range(depth)}


def row_plan(
    inline: torch.Tensor,
    layers: int,
    choice: Choice,
    chosen: torch.Tensor,
    filled: int,
    view: SlotView | None,
    watcher: Watcher | None,
) -> RowPlan:
    """The plan of the repair pass: inline rows in every layer, `chosen` ones where the choice has them.

    Args:
        inline: ``[m]`` int64 ascending slots; `chosen`: ``[K]`` int64, what `cut` left of the ranking.
        watcher: a correction's; it sees the pass beside what the choice itself needs.
    """
    last = layers if choice.last is None else choice.last
    counts = counts_by_layer(choice, len(chosen), layers) if choice.decline else {}
    head = choice.ranking[: max(counts.values(), default=0)] if counts else chosen
    rows = torch.cat((inline, head)).unique()
    plan = RowPlan(rows, filled, view=view, watcher=watcher)
    always = torch.searchsorted(rows, inline)
    if choice.narrow is not None:
        narrowing = choice.narrow(counts)
        plan.watcher = narrowing if watcher is None else Watchers([watcher, narrowing])
    if choice.entering is not None:
        slots, states = choice.entering
        at = torch.searchsorted(slots, rows).clamp(max=len(slots) - 1)
        those = (slots[at] == rows).nonzero()[:, 0]
        plan.entering = (choice.first, those, states[at[those]][None])
        others = (slots[at] != rows).nonzero()[:, 0]
        plan.active.update(dict.fromkeys(range(choice.first), others))
    plan.active.update(dict.fromkeys(range(last, layers), always))
    if counts and choice.narrow is None:
        for layer, count in counts.items():
            plan.active[layer] = torch.cat((always, torch.searchsorted(rows, choice.ranking[:count]))).unique()
    return plan
