"""Which rows one forward computes, in which layers, and what each of them may see.

    slots   0 1 2 3 4 5 6 7 8        rows = [2, 7, 8]: row 2 sees slots 0..2, row 7 sees 0..7, row 8 sees 0..8
            d d d d d d d q q        (d: a document's slot, q: the question's)

The mask goes by slot, never by the index inside `rows`: a gathered early row must not see later documents. Slots are in
logical order; a slot's logical position is slot + offset, unless the plan has a `SlotView`, which then says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

_BLOCK_ROWS = 512  # bounds the mask of a block of neighbours
FOLDED_ROWS = 64  # up to here, folding the query heads of a group into rows is quicker than leaving them apart
_BLOCK_SCATTERED = 128  # of scattered rows: smaller, so that early rows do not scan late keys
Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values
_ACTIVE: ContextVar[RowPlan | None] = ContextVar("kvquilt_row_plan", default=None)


@dataclass(frozen=True, eq=False, slots=True)
class SlotView:
    """Slots that do not stand at their own number, or are not attended to plainly.

    Attributes:
        positions: ``[n]`` int64, logical position of the first n slots; slot s >= n stands at ``s + shift``.
        tempered: ``[n]`` bool, slots whose logits are divided by `temperature`; attention to them is a part of its
            own, merged with the rest by log-sum-exp times ``scale * temperature`` (APE, arXiv 2502.05431).
    """

    positions: torch.Tensor
    shift: int = 0
    tempered: torch.Tensor | None = None
    temperature: float = 1.0
    scale: float = 1.0

    def at(self, slots: torch.Tensor) -> torch.Tensor:
        """Logical positions of `slots`."""
        known = len(self.positions)
        return torch.where(slots < known, self.positions[slots.clamp(max=known - 1)], slots + self.shift)

    def marked(self, filled: int) -> torch.Tensor | None:
        """``[filled]`` bool: `tempered` for all slots; later ones are not."""
        if self.tempered is None:
            return None
        out = torch.zeros(filled, dtype=torch.bool)
        out[: len(self.tempered)] = self.tempered[:filled]
        return out


class Watcher:
    """Sees a forward as it goes; each method may be overridden. Called under the model's lock, in layer order."""

    def enters(self, layer: int, plan: RowPlan, hidden: torch.Tensor) -> None:
        """`hidden` ``[batch, plan rows, width]`` is about to enter `layer`; it must not be changed."""

    def writes(self, layer: int, plan: RowPlan, slots: Pair, fresh: Pair) -> None:
        """`fresh` keys and values ``[batch, kv_heads, current rows, dim]`` are about to overwrite their `slots`
        ``[batch, kv_heads, capacity, dim]``, which are the request's own and may be changed elsewhere."""

    def attends(
        self, layer: int, plan: RowPlan, query: torch.Tensor, keys: torch.Tensor, scaling: float, window: int | None
    ) -> None:
        """`query` ``[batch, heads, current rows, dim]`` is about to attend to `keys` ``[batch, groups, filled, ...]``,
        scaled by `scaling`."""


class Watchers(Watcher):
    """Several watchers of one forward."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def enters(self, layer: int, plan: RowPlan, hidden: torch.Tensor) -> None:
        for watcher in self._watchers:
            watcher.enters(layer, plan, hidden)

    def writes(self, layer: int, plan: RowPlan, slots: Pair, fresh: Pair) -> None:
        for watcher in self._watchers:
            watcher.writes(layer, plan, slots, fresh)

    def attends(
        self, layer: int, plan: RowPlan, query: torch.Tensor, keys: torch.Tensor, scaling: float, window: int | None
    ) -> None:
        for watcher in self._watchers:
            watcher.attends(layer, plan, query, keys, scaling, window)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``first:last`` see slots ``low:high`` under `mask` ``[rows, high - low]``.

    Of at most `FOLDED_ROWS` rows the mask is repeated for every head of a group, ``[group * rows, high - low]``: for
    more it would take more memory than the keys.
    """

    first: int
    last: int
    low: int
    high: int
    mask: torch.Tensor | None


@dataclass(eq=False, slots=True)
class Rows:
    """The rows of one or several layers, with how to write them and what they see.

    Attributes:
        slots: ``[R]`` int64 on the CPU, strictly ascending.
    """

    slots: torch.Tensor
    plan: RowPlan = field(repr=False)
    _index: slice | torch.Tensor | None = field(default=None, repr=False)
    _blocks: dict[tuple[object, ...], list[Block]] = field(default_factory=dict, repr=False)

    @property
    def index(self) -> slice | torch.Tensor:
        """How to write the rows: a slice where they are contiguous, which needs no gather. Asked once per layer."""
        if self._index is None:
            if len(self.slots) and int(self.slots[-1]) - int(self.slots[0]) + 1 == len(self.slots):
                self._index = slice(int(self.slots[0]), int(self.slots[-1]) + 1)
            else:
                self._index = self.slots
        return self._index

    @property
    def is_prefill(self) -> bool:
        """All slots are computed and seen plainly, so causal attention without a mask is right."""
        return len(self.slots) == self.plan.filled and self.plan.view is None and self.plan.visible is None

    def blocks(self, layer: int, window: int | None, group: int, like: torch.Tensor) -> list[Block]:
        """Blocks of rows with their masks for one window; built once per forward and window."""
        seen = layer if self.plan.visible is not None and self.plan.visible.dim() == 2 else None
        key = (seen, window, group, like.dtype, like.device)
        if key not in self._blocks:
            step = _BLOCK_ROWS if isinstance(self.index, slice) else _BLOCK_SCATTERED
            starts = range(0, len(self.slots), step)
            self._blocks[key] = [self._block(i, i + step, seen, window, group, like) for i in starts]
        return self._blocks[key]

    def _block(
        self, first: int, last: int, layer: int | None, window: int | None, group: int, like: torch.Tensor
    ) -> Block:
        rows, view, visible = self.slots[first:last], self.plan.view, self.plan.visible
        high = int(rows[-1]) + 1
        # positions that slots do not give may come in any order
        low = 0 if window is None or view is not None else max(0, int(rows[0]) - window + 1)
        if len(rows) == 1 and view is None and visible is None:
            return Block(first, first + 1, low, high, None)
        keys = torch.arange(low, high)
        hidden = keys > rows[:, None]
        if visible is not None:
            # a row always sees itself: with nothing to see, it would be NaN
            hidden |= ~(visible if layer is None else visible[layer])[low:high] & (keys != rows[:, None])
        if window is not None:
            behind = rows[:, None] - keys if view is None else view.at(rows)[:, None] - view.at(keys)
            hidden |= behind >= window
        # a float mask: some kernels add a boolean one as 0 and 1
        mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, torch.finfo(like.dtype).min)
        folded = mask.repeat(group, 1) if len(rows) <= FOLDED_ROWS else mask
        return Block(first, first + len(rows), low, high, folded.to(like.device))


@dataclass(eq=False, slots=True)
class RowPlan:
    """The rows one forward computes.

    Attributes:
        rows: ``[R]`` int64 on the CPU, strictly ascending slot indices.
        filled: slots that hold keys once the rows are written; slot ``filled`` and later are never read.
        offset: logical position of slot 0; without meaning beside a `view`.
        view: where slots stand, if not at slot + offset.
        visible: ``[filled]`` or ``[layers, filled]`` bool: slots that may be seen at all; None for all. A row always
            sees itself.
        active: by layer, ``[A]`` int64 ascending indices into `rows` of those it computes; layers that are not named
            compute all. A row that sits a layer out keeps its hidden state and what its slot holds there. May grow
            while the forward goes, for layers still to come.
        entering: a layer, ``[E]`` indices into `rows`, and the hidden states ``[batch, E, width]`` with which those
            rows enter it in place of the computed ones.
        until: stop inside this layer, once its keys are written; its output is not computed.
        queries: with `until`, stop only after the watcher has seen that layer's queries.
        watcher: sees the forward go.
        windows: what each call of attention was given, in order; filled as the forward goes.
        pairs: query-key pairs attended to so far, over all layers: what attention's cost is proportional to.
    """

    rows: torch.Tensor
    filled: int
    offset: int = 0
    view: SlotView | None = None
    visible: torch.Tensor | None = None
    active: dict[int, torch.Tensor] = field(default_factory=dict)
    entering: tuple[int, torch.Tensor, torch.Tensor] | None = None
    until: int | None = None
    queries: bool = False
    watcher: Watcher | None = None
    windows: list[int | None] = field(default_factory=list, repr=False)
    pairs: int = 0
    current: Rows = field(init=False, repr=False)
    _all: Rows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.current = self._all = Rows(self.rows, self)

    @property
    def positions(self) -> torch.Tensor:
        """Logical positions of the rows, ``[R]`` int64."""
        return self.rows + self.offset if self.view is None else self.view.at(self.rows)

    @property
    def walks(self) -> bool:
        """Whether layers have to be entered one by one: not all compute all rows, or somebody watches."""
        return bool(self.active) or self.entering is not None or self.watcher is not None

    def enter(self, layer: int) -> torch.Tensor | None:
        """Make the rows of `layer` the current ones; their indices into `rows`, or None for all."""
        indices = self.active.get(layer)
        if indices is None:
            self.current = self._all
        elif layer == 0 or indices is not self.active.get(layer - 1):
            self.current = Rows(self.rows[indices], self)
        return indices

    def part(self, first: int, last: int) -> RowPlan:
        """The plan of ``rows[first:last]`` alone. Parts that run one behind the other give what the whole gives, since
        earlier rows never see later ones. For plans that nobody watches.
        """
        parts: dict[int, torch.Tensor] = {}  # layers that share their indices go on sharing them, and so their masks
        active = {layer: parts.setdefault(id(at), _between(at, first, last)) for layer, at in self.active.items()}
        entering = None
        if self.entering is not None:
            layer, at, hidden = self.entering
            entering = layer, _between(at, first, last), hidden[:, (at >= first) & (at < last)]
        return RowPlan(
            self.rows[first:last], self.filled, self.offset, self.view, self.visible, active=active, entering=entering,
            until=self.until,
        )  # fmt: skip

    def count_pairs(self, window: int | None) -> None:
        """Add this layer's pairs to `pairs`."""
        seen = self.current.slots + 1
        self.pairs += int((seen if window is None else seen.clamp(max=window)).sum())


def _between(at: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Indices into a list as indices into its part ``first:last``, without those outside."""
    return at[(at >= first) & (at < last)] - first


class LayerReached(Exception):  # no error: it leaves a forward that has done its work
    """The plan's `until` is done."""


@contextmanager
def active(plan: RowPlan) -> Iterator[None]:
    """Make `plan` the one that attention and slots follow inside the block."""
    token = _ACTIVE.set(plan)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def current_plan() -> RowPlan | None:
    return _ACTIVE.get()
