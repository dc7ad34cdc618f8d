"""What kv-packet (arXiv 2604.13226), sempic and joint (arXiv 2607.28069) have to train: a LoRA adapter, a header, a
trailer, each there or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvquilt.errors import InputError, UnsupportedModelError
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts, parts_of
from kvquilt.training.begun import Begun
from kvquilt.training.student import Student
from kvquilt.writers.artefact import make_writer
from kvquilt.writers.trained import Trained

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a writer's parts; 0 switches one off. A `Trainable`.

    Attributes:
        rank: of the adapter; `alpha` / rank is its scaling.
        targets: last names of the linear layers it is on, in every decoder layer.
        header, trailer: soft tokens before and behind every document.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = TARGETS
    header: int = 0
    trailer: int = 0

    def __post_init__(self) -> None:
        if min(self.rank, self.header, self.trailer) < 0 or not self.rank + self.header + self.trailer:
            raise InputError("shape", "rank, header and trailer are at least 0, one of them above", f"{self}")
        if self.rank and not self.targets:
            raise InputError("targets", "an adapter needs at least one linear layer")
        if self.rank and not 0 < self.alpha < math.inf:
            raise InputError("alpha", "a finite number above 0", self.alpha)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of ``adapter``, ``header``, ``trailer``: those that are there."""
        sizes = (("adapter", self.rank), ("header", self.header), ("trailer", self.trailer))
        return tuple(name for name, size in sizes if size)

    @property
    def plain(self) -> bool:
        return self.kinds == ("adapter",)  # its B is zero

    @property
    def rows(self) -> int:
        return self.header + self.trailer

    def kind_of(self, name: str) -> str:
        return "adapter" if "lora_" in name else name

    def soft(self, name: str) -> bool:
        return "lora_" not in name

    def sized(self, start: Begun) -> Shape:
        shape, there = self, start.named
        pairs = [name for name in there if name.endswith(".lora_A")]
        if shape.rank and pairs:
            last = tuple(dict.fromkeys(name.removesuffix(".lora_A").rsplit(".", 1)[1] for name in pairs))
            shape = replace(shape, rank=len(there[pairs[0]]), alpha=start.alpha, targets=last)
        if shape.header and "header" in there:
            shape = replace(shape, header=len(there["header"]))
        if shape.trailer and "trailer" in there:
            shape = replace(shape, trailer=len(there["trailer"]))
        return shape

    def drawn(self, model: LanguageModel, seed: int) -> dict[str, torch.Tensor]:
        """``header`` ``[h, width]``, ``trailer`` ``[t, width]``, drawn like a token's embedding, and for every adapted
        layer ``<name>.lora_A`` ``[rank, in]`` and ``<name>.lora_B`` ``[out, rank]``, which is zero.

        Raises:
            UnsupportedModelError: the model has no linear layer with one of the names.
        """
        draw = torch.Generator().manual_seed(seed)
        soft = soft_rows(model, {"header": self.header, "trailer": self.trailer}, draw)
        return soft | (adapter(model, self.rank, self.targets, draw) if self.rank else {})

    def parts(self, named: Mapping[str, torch.Tensor]) -> Parts:
        return parts_of(named, self.alpha)

    def pupil(self, model: LanguageModel, prefix: tuple[int, ...], keep_all: bool) -> Student:
        return Student(model, self.header, self.trailer, prefix, keep_all)

    def writer(
        self,
        kind: str,
        model: LanguageModel,
        named: Mapping[str, torch.Tensor],
        prefix: tuple[int, ...],
        base_name: str,
    ) -> Trained:
        return make_writer(kind, model.fingerprint, named, self.alpha, prefix, base_name)


def soft_rows(model: LanguageModel, counts: Mapping[str, int], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Soft tokens by name, drawn like the embedding of a token."""
    embeddings: Any = model.hf.get_input_embeddings()
    with torch.no_grad():  # of what enters the layers: some models scale their embeddings
        drawn = torch.randperm(len(embeddings.weight), generator=draw)[:4096]
        rows = embeddings(drawn.to(model.device)).float()
    named = {}
    for name, count in counts.items():
        if count:
            normal = torch.randn(count, rows.shape[-1], generator=draw)
            named[name] = (normal * rows.std().cpu() + rows.mean().cpu()).to(model.device)
    return named


def adapter(model: LanguageModel, rank: int, targets: Sequence[str], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """A LoRA adapter that changes nothing yet.

    Raises:
        UnsupportedModelError: the model has no linear layer with one of the names.
    """
    named = {}
    for name, layer in linear_layers(model, targets):
        bound = 1 / math.sqrt(layer.in_features)
        uniform = torch.rand(rank, layer.in_features, generator=draw) * 2 - 1
        named[f"{name}.lora_A"] = (uniform * bound).to(model.device)
        named[f"{name}.lora_B"] = torch.zeros(layer.out_features, rank, device=model.device)
    return named


def linear_layers(model: LanguageModel, targets: Sequence[str]) -> list[tuple[str, torch.nn.Linear]]:
    """Name below the base model and layer, of every decoder layer's linear layers with those last names."""
    found = [
        (name, layer)
        for name, layer in model.hf.base_model.named_modules()
        if name.startswith("layers.") and isinstance(layer, torch.nn.Linear)
    ]
    last = {name.rsplit(".", 1)[1] for name, _ in found}
    missing = sorted(set(targets) - last)
    if missing:
        raise UnsupportedModelError(
            f"{model.name} has no linear layer named {', '.join(missing)}; it has {', '.join(sorted(last)) or 'none'}"
        )
    return [(name, layer) for name, layer in found if name.rsplit(".", 1)[1] in targets]
