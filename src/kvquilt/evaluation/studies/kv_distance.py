"""How far the keys and values of the documents that answer are from full prefill's, layer by layer, under some arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvquilt.errors import InputError
from kvquilt.evaluation.run.arms import FULL, find_arm
from kvquilt.evaluation.run.folder import Line
from kvquilt.evaluation.run.self_transfer import cut_out
from kvquilt.evaluation.tasks.item import Item
from kvquilt.ledger import Ledger
from kvquilt.placement import place_runs
from kvquilt.request import Request
from kvquilt.retrieval import ranked_documents

if TYPE_CHECKING:
    from kvquilt.engine import Engine

Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values ``[layers, kv_heads, rows, dim]``, keys in the local frame


@dataclass(frozen=True, eq=False, slots=True)
class KVDistance:
    """One line for an item: by arm, or why it could not run.

    Rows are compared token by token, keys in the local frame, so a document that moved is the same document. `l2`: norm
    of the difference over the norm of full prefill's, over all heads and rows of a layer; `cosine`: of a row's heads
    together, mean over rows.

    Attributes:
        arms: as they are written; of full prefill only the plain one.

    Raises:
        InputError: an arm that reads another prompt, or this one in another layout.
    """

    engine: Engine
    arms: Sequence[str]
    tenant: str | None = None

    def __post_init__(self) -> None:
        for arm in map(find_arm, self.arms):
            if arm.deranged or not (arm.method.reuses or arm.name == FULL):
                raise InputError("arms", "must read the item's own documents by a method, or be full", arm.name)

    def line(self, item: Item) -> Line:
        """``arms``: name -> ``keys`` and ``values``, each with ``l2`` and ``cosine`` by layer; or ``refused``.

        Raises:
            InputError: no gold.
        """
        if not item.gold:
            raise InputError("gold", "the documents that the answer rests on must be known", item.id)
        full = self._rows(FULL, item)
        found: dict[str, Any] = {}
        for name in self.arms:
            try:
                mine = self._rows(name, item)
            except InputError as error:
                found[name] = {"refused": str(error)}
                continue
            found[name] = {part: apart(a, b) for part, a, b in zip(("keys", "values"), mine, full, strict=True)}
        return {"tokens": full[0].shape[2], "arms": found}

    def _rows(self, name: str, item: Item) -> Rows:
        """Of the gold documents under an arm, in the order in which the item names them."""
        arm, model = find_arm(name), self.engine.model
        runs = self.engine.prompt(item.question, item.documents).runs(model.tokenizer)
        order = arm.ranking(item, ranked_documents(item.question, item.documents), None)
        request = Request(
            self.engine.reader, place_runs(runs, arm.method.order, order, arm.method.moved), arm.method, 1, self.tenant
        )
        try:
            request.read(Ledger(method=name), 1)
            placement, cache = request.placement, request.scene.placed
            at = {placement.runs[i].document: i for i in placement.documents()}
            cut = [cut_out(model, cache, placement, at[item.documents[n]]) for n in item.gold]
            return torch.cat([each.keys for each in cut], 2), torch.cat([each.values for each in cut], 2)
        finally:
            request.release()


def apart(mine: torch.Tensor, full: torch.Tensor) -> dict[str, list[float]]:
    """``[layers, kv_heads, rows, dim]`` each: relative L2 and cosine by layer; five digits."""
    a, b = mine.float(), full.float()
    norm = b.flatten(1).norm(dim=1).clamp(min=1e-30)
    l2 = (a - b).flatten(1).norm(dim=1) / norm
    one, other = (each.transpose(1, 2).flatten(2) for each in (a, b))
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=2).mean(1)
    return {"l2": _short(l2), "cosine": _short(cosine)}


def _short(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]
