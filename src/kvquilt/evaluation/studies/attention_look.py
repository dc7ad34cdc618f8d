"""Where the rows that answer look, under one arm: their queries over the arm's own keys and values, layer by layer.

    rows    the prompt's last token, and the accepted answer's tokens but the last, teacher-forced

All of them run once more over the cache that the arm has left, and their rotated queries are kept: few rows of small
vectors. Weights are then made a layer at a time from these and the cache, so no map of all layers is ever there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvquilt.document import Document
from kvquilt.errors import UnsupportedModelError
from kvquilt.evaluation.run.sounding import gold_ids
from kvquilt.evaluation.run.standing import reading
from kvquilt.evaluation.tasks.item import Item
from kvquilt.ledger import Ledger
from kvquilt.model.probabilities import probabilities
from kvquilt.model.rows import RowPlan, Watcher
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement
from kvquilt.repair.presets import Method
from kvquilt.request import Request

if TYPE_CHECKING:
    from kvquilt.engine import Engine


@dataclass(frozen=True, eq=False, slots=True)
class Spot:
    """Where a document is in a cache.

    Attributes:
        tokens: ``[n]`` int64, the slot of each of its tokens; -1 of one that has none, since it was dropped or is seen
            by layers of its own. Soft tokens are not among them.
        around: ``[m]`` int64, ascending: slots of all that stands for it, soft tokens included.
    """

    tokens: torch.Tensor
    around: torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class _Asked:
    query: torch.Tensor
    scaling: float
    window: int | None


class _Queries(Watcher):
    """Keeps what every layer's rows ask."""

    def __init__(self) -> None:
        self.by_layer: dict[int, _Asked] = {}

    def attends(
        self, layer: int, plan: RowPlan, query: torch.Tensor, keys: torch.Tensor, scaling: float, window: int | None
    ) -> None:
        if layer in self.by_layer:
            raise UnsupportedModelError(f"layer {layer} attends more than once; its weights are not one map")
        self.by_layer[layer] = _Asked(query.clone(), scaling, window)


@dataclass(frozen=True, eq=False, slots=True)
class Look:
    """One arm's cache with the answering rows behind its prompt. Valid while its context is open.

    Attributes:
        rows: ``[Q]`` int64, their slots.
        spots: of the item's documents, in the item's order.
    """

    cache: SlotCache
    rows: torch.Tensor
    spots: tuple[Spot, ...]
    _queries: _Queries = field(repr=False)

    @property
    def layers(self) -> int:
        return len(self._queries.by_layer)

    def weights(self, layer: int) -> torch.Tensor:
        """``[heads, Q, filled]`` fp32."""
        asked, cache = self._queries.by_layer[layer], self.cache
        keys = cache.slot_keys[layer, :, :, : cache.filled]
        return probabilities(asked.query, keys, self.rows, asked.scaling, asked.window, cache.view)

    def values(self, layer: int) -> torch.Tensor:
        """``[kv_heads, filled, dim]`` fp32."""
        return self.cache.slot_values[layer, 0, :, : self.cache.filled].float()


def answer_ids(engine: Engine, item: Item) -> tuple[int, ...]:
    """The canonical answer's own tokens, without the end of the turn."""
    ids = gold_ids(engine, item)
    return ids[:-1] if len(ids) > 1 and ids[-1] in engine.model.stop_ids else ids


@contextmanager
def looking(
    engine: Engine,
    placement: Placement,
    method: Method,
    tenant: str | None,
    documents: Sequence[Document],
    answer: Sequence[int],
    in_parts: bool = False,
) -> Iterator[Look]:
    """Read the prompt by `method` and force `answer` behind it; the cache goes back when the context ends.

    Args:
        documents: the item's; each stands in the placement.
        in_parts: full prefill in two forwards, which differs by rounding alone.

    Raises:
        InputError: the method's budget cannot pay for its probe, or it cannot run on this prompt.
    """
    if in_parts:
        with reading(engine, placement, method, tenant, len(answer), True) as standing:
            yield _looked(engine, standing.cache, placement, documents, answer)
        return
    request = Request(engine.reader, placement, method, 1, tenant)
    try:
        request.read(Ledger(method=method.name), len(answer))
        yield _looked(engine, request.scene.placed, request.placement, documents, answer)
    finally:
        request.release()


def _looked(
    engine: Engine, cache: SlotCache, placement: Placement, documents: Sequence[Document], answer: Sequence[int]
) -> Look:
    slots = _slots(cache, placement)
    first, queries = cache.filled - 1, _Queries()
    # the prompt's last row again: over the same keys it is the same, and its query has not been kept
    ids = [placement.ids[-1], *answer[:-1]]
    rows = torch.arange(first, first + len(ids))
    plan = RowPlan(rows, first + len(ids), view=cache.view, watcher=queries)
    engine.model.forward(torch.tensor([ids]), plan, cache, 1)
    left = {i: placement.runs[i].document for i in placement.documents()}
    spots = []
    for document in documents:
        at = next(i for i, each in left.items() if each == document)
        del left[at]
        run, span = placement.runs[at], placement.span(at)
        if not run.placed:
            spots.append(Spot(torch.full((len(run.ids),), -1), torch.empty(0, dtype=torch.int64)))
            continue
        extent = placement.extent(at)
        around = slots[extent.start : extent.stop]
        spots.append(Spot(slots[span.start : span.stop], around[around >= 0]))
    return Look(cache, rows, tuple(spots), queries)


def _slots(cache: SlotCache, placement: Placement) -> torch.Tensor:
    """``[placement's slots]`` int64: where each is in the cache; -1 where it was dropped."""
    if cache.filled == placement.tokens or cache.view is None:
        return torch.arange(placement.tokens)
    out = torch.full((placement.tokens,), -1)
    out[cache.view.positions] = torch.arange(len(cache.view.positions))  # compacted: they keep where they stood
    return out
