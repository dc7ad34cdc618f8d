"""The tokens of a segment that its repetition attends to: QCFuse's digest (arXiv 2606.05875)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.model.attention_rows import attention_rows
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan, Watcher
from kvquilt.model.slots import SlotCache
from kvquilt.writers.extra import Observation


@dataclass(frozen=True, slots=True)
class Digest:
    """Side data ``digest``, int32 [layers, ceil(share * tokens)]: per layer the most attended tokens, best first.

    Once the segment is encoded, `instruction` (ids that ask to repeat it) runs behind it; a token's score is the
    attention it receives from the instruction's rows, summed over rows and heads. Of equals the earlier token wins.
    """

    instruction: tuple[int, ...]
    share: float = 0.15

    def __post_init__(self) -> None:
        if not self.instruction:
            raise InputError("instruction", "at least one token id")
        if not 0 < self.share <= 1:
            raise InputError("share", "above 0 and at most 1", self.share)

    @property
    def names(self) -> frozenset[str]:
        return frozenset({"digest"})

    @property
    def digest(self) -> str:
        instruction, share = encode_ids(self.instruction), repr(float(self.share))
        return digest_fields("kvquilt 2026-11 extra digest v1", [("instruction", instruction), ("share", share)])

    def observe(self, behind: tuple[int, ...], ids: tuple[int, ...]) -> Observation:
        return _Repeated(self, range(len(behind), len(behind) + len(ids)))


class _Repeated(Observation):
    def __init__(self, settings: Digest, span: range) -> None:
        self._settings, self._span = settings, span
        self.room = len(settings.instruction)

    def side(self, model: LanguageModel, cache: SlotCache, counter: RowCounter | None) -> Mapping[str, torch.Tensor]:
        received, stop = _Received(self._span), self._span.stop
        rows = torch.arange(stop, stop + self.room)
        plan = RowPlan(rows, stop + self.room, until=model.capability.layers - 1, queries=True, watcher=received)
        model.forward(torch.tensor([self._settings.instruction]), plan, cache, 0, counter)
        # the nearest double of share * tokens may lie a little above a whole number
        count = math.ceil(self._settings.share * len(self._span) - 1e-9)
        ranked = torch.stack(received.by_layer).argsort(dim=-1, descending=True, stable=True)
        return {"digest": ranked[:, :count].to(torch.int32).cpu().contiguous()}


class _Received(Watcher):
    """Attention that the tokens of a span receive, by layer."""

    def __init__(self, span: range) -> None:
        self._span = slice(span.start, span.stop)
        self.by_layer: list[torch.Tensor] = []

    def attends(
        self, layer: int, plan: RowPlan, query: torch.Tensor, keys: torch.Tensor, scaling: float, window: int | None
    ) -> None:
        blocks = attention_rows(query, keys, plan.current.slots, scaling, window)
        self.by_layer.append(torch.stack([w[:, :, self._span].sum((0, 1)) for _, w in blocks]).sum(0))
