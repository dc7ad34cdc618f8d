"""Hidden states that enter a layer, so that a band of layers can be computed again from there (DroidSpeak, arXiv
2411.02820)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvquilt.errors import InputError
from kvquilt.identity import digest_fields
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.writers.extra import Observation


@dataclass(frozen=True, slots=True)
class Residual:
    """Side data ``residual-<layer>``, model dtype [tokens, width]: the segment's hidden states entering `layer`."""

    layer: int

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise InputError("layer", "at least 1: what enters layer 0 is the embedding", self.layer)

    @property
    def name(self) -> str:
        return f"residual-{self.layer}"

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.name})

    @property
    def digest(self) -> str:
        return digest_fields("kvquilt 2026-11 extra residual v1", [("layer", str(self.layer))])

    def observe(self, behind: tuple[int, ...], ids: tuple[int, ...]) -> Observation:
        return _Entering(self)


class _Entering(Observation):
    def __init__(self, settings: Residual) -> None:
        self._settings = settings
        self._hidden: torch.Tensor | None = None

    def enters(self, layer: int, plan: RowPlan, hidden: torch.Tensor) -> None:
        if layer == self._settings.layer:
            with torch.inference_mode(False):  # it is stored, and may be trained on
                self._hidden = hidden[0].cpu().clone()

    def side(self, model: LanguageModel, cache: SlotCache, counter: RowCounter | None) -> Mapping[str, torch.Tensor]:
        if self._hidden is None:
            layers = model.capability.layers
            raise InputError("layer", f"{model.name} has layers 0 to {layers - 1}", self._settings.layer)
        return {self._settings.name: self._hidden}
