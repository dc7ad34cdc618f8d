"""Rows of several requests in one forward: the weights are read once for all, and every row sees its own cache alone.

    rows      0 1 2     3         4 5        the next three tokens of one request, one of another, two of a third
    cache     first     second    third

What passes the linear layers side by side is what makes decoding slow; attention goes request by request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvquilt.model.rows import RowPlan, SlotView, active
from kvquilt.model.slots import SlotCache


@dataclass(eq=False, slots=True)
class Together(RowPlan):
    """The plans of several requests, one behind the other; `rows` count through all of them.

    Attributes:
        members: a plan and its cache for each request.
    """

    members: tuple[tuple[RowPlan, SlotCache], ...] = ()

    def __post_init__(self) -> None:
        """No rows of its own: they refer to their plan, and caches would stay until the next garbage collection."""

    @property
    def positions(self) -> torch.Tensor:
        return torch.cat([plan.positions for plan, _ in self.members])

    def each(self) -> Iterator[tuple[RowPlan, SlotCache, slice]]:
        """Plan, cache and rows of each request."""
        edges = [0]
        for plan, _ in self.members:
            edges.append(edges[-1] + len(plan.rows))
        for (plan, cache), (first, last) in zip(self.members, pairwise(edges), strict=True):
            yield plan, cache, slice(first, last)


class _Layer(CacheLayerMixin):
    """One layer of all caches. What it gives attention is not looked at: each request's own is."""

    is_croppable = False

    def __init__(self, layer: int, plan: Together) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer, self._plan = layer, plan
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: slots exist before the first update."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for plan, cache, rows in self._plan.each():
            with active(plan):
                cache.slot_layers[self._layer].update(key_states[:, :, rows], value_states[:, :, rows])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return self._plan.filled

    def get_max_length(self) -> int:
        return self._plan.filled


class TogetherCache(Cache):
    """All caches of a plan as one; what is written goes to each request's own."""

    def __init__(self, plan: Together) -> None:
        _, first = plan.members[0]
        super().__init__(layers=[_Layer(i, plan) for i in range(len(first.slot_layers))])
        self.parts = first.parts
        self.filled = 0
        self.view: SlotView | None = None
