"""Scores of slots by the attention that they receive while a probe goes through the model."""

from __future__ import annotations

from collections.abc import Set

import torch

from kvquilt.model.attention_rows import attention_rows
from kvquilt.model.rows import RowPlan, Watcher


class Received(Watcher):
    """Attention that every slot receives from some of a probe's rows, reduced over heads, rows and layers.

    Args:
        rows: ``[Q]`` int64 slots of the rows that count, ascending.
        scope: ``[filled]`` bool, slots over which each row's weights sum to 1; None for all that it sees. What the
            probe's own attention may see is another matter.
        layers: those that count; the result is their mean.
        heads: ``mean`` or ``max`` over heads.
        over_rows: ``mean``, ``max`` or ``l2`` over rows, after heads.
    """

    def __init__(
        self, rows: torch.Tensor, scope: torch.Tensor | None, layers: Set[int], heads: str, over_rows: str
    ) -> None:
        self._rows, self._scope, self._layers = rows, scope, layers
        self._heads, self._over_rows = heads, over_rows
        self._by_layer: list[torch.Tensor] = []

    @property
    def scores(self) -> torch.Tensor:
        """``[filled]`` fp32 on the CPU."""
        return torch.stack(self._by_layer).mean(0).cpu()

    def attends(
        self, layer: int, plan: RowPlan, query: torch.Tensor, keys: torch.Tensor, scaling: float, window: int | None
    ) -> None:
        if layer not in self._layers:
            return
        at = torch.searchsorted(plan.current.slots, self._rows).to(query.device)
        total = torch.zeros(plan.filled, device=query.device)
        for _, weights in attention_rows(
            query[:, :, at], keys, self._rows, scaling, window, scope=self._scope, view=plan.view
        ):
            by_row = weights.mean(0) if self._heads == "mean" else weights.amax(0)
            part = total[: by_row.shape[1]]
            if self._over_rows == "max":
                torch.maximum(part, by_row.amax(0), out=part)
            else:
                part += (by_row.square() if self._over_rows == "l2" else by_row).sum(0)
        if self._over_rows == "l2":
            total.sqrt_()
        elif self._over_rows == "mean":
            total /= len(self._rows)
        self._by_layer.append(total)
