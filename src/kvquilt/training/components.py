"""What is trained: a LoRA adapter, a header, a trailer, each switched on or off and trained or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvquilt.errors import InputError, UnsupportedModelError
from kvquilt.identity import digest_fields
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts, parts_of

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a writer's parts; 0 switches one off.

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

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of ``adapter``, ``header``, ``trailer``: those that are there."""
        sizes = (("adapter", self.rank), ("header", self.header), ("trailer", self.trailer))
        return tuple(name for name, size in sizes if size)


def shape_with(shape: Shape, there: Mapping[str, torch.Tensor], alpha: float) -> Shape:
    """A shape whose parts, as far as they are `there`, have the sizes that they have there."""
    pairs = [name for name in there if name.endswith(".lora_A")]
    if shape.rank and pairs:
        last = tuple(dict.fromkeys(name.removesuffix(".lora_A").rsplit(".", 1)[1] for name in pairs))
        shape = replace(shape, rank=len(there[pairs[0]]), alpha=alpha, targets=last)
    if shape.header and "header" in there:
        shape = replace(shape, header=len(there["header"]))
    if shape.trailer and "trailer" in there:
        shape = replace(shape, trailer=len(there["trailer"]))
    return shape


class Components:
    """Parameters in fp32, on the model's device.

    Attributes:
        named: by name, in a fixed order: ``header`` ``[h, width]``, ``trailer`` ``[t, width]``, and for every adapted
            layer ``<name>.lora_A`` ``[rank, in]`` and ``<name>.lora_B`` ``[out, rank]``.
    """

    def __init__(self, shape: Shape, named: Mapping[str, torch.Tensor], trained: Sequence[str] = ()) -> None:
        """`trained`: of ``adapter``, ``header``, ``trailer``; all that are there if empty."""
        self.shape = shape
        kinds = set(trained) or {"adapter", "header", "trailer"}
        self.named = {
            name: torch.nn.Parameter(tensor, requires_grad=("adapter" if "lora_" in name else name) in kinds)
            for name, tensor in named.items()
        }

    @classmethod
    def fresh(cls, model: LanguageModel, shape: Shape, seed: int, trained: Sequence[str] = ()) -> Components:
        """B is zero, so an adapter starts as pure reuse; soft tokens are drawn like a token's embedding.

        Raises:
            UnsupportedModelError: the model has no linear layer with one of the names.
        """
        draw = torch.Generator().manual_seed(seed)
        named: dict[str, torch.Tensor] = {}
        embeddings: Any = model.hf.get_input_embeddings()
        with torch.no_grad():  # of what enters the layers: some models scale their embeddings
            drawn = torch.randperm(len(embeddings.weight), generator=draw)[:4096]
            rows = embeddings(drawn.to(model.device)).float()
        for name, count in (("header", shape.header), ("trailer", shape.trailer)):
            if count:
                normal = torch.randn(count, rows.shape[-1], generator=draw)
                named[name] = (normal * rows.std().cpu() + rows.mean().cpu()).to(model.device)
        for name, layer in linear_layers(model, shape.targets) if shape.rank else ():
            bound = 1 / math.sqrt(layer.in_features)
            uniform = torch.rand(shape.rank, layer.in_features, generator=draw) * 2 - 1
            named[f"{name}.lora_A"] = (uniform * bound).to(model.device)
            named[f"{name}.lora_B"] = torch.zeros(layer.out_features, shape.rank, device=model.device)
        return cls(shape, named, trained)

    @classmethod
    def begun(
        cls, model: LanguageModel, shape: Shape, seed: int, there: Mapping[str, torch.Tensor], trained: Sequence[str]
    ) -> Components:
        """`fresh`, with copies of the tensors that are `there` already.

        Raises:
            InputError: one of them is of no part of this shape, or of another size.
        """
        made = cls.fresh(model, shape, seed, trained)
        for name, tensor in there.items():
            if name not in made.named:
                raise InputError("from", "the artefact has a part that the new writer has not", name)
            if tensor.shape != made.named[name].shape:
                rule = f"rank, header and trailer must be the artefact's: {name} is {tuple(tensor.shape)} there"
                raise InputError("from", rule, f"{tuple(made.named[name].shape)}")
            with torch.no_grad():
                made.named[name].copy_(tensor)
        return made

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.named.items() if p.requires_grad}

    @property
    def digest(self) -> str:
        """Of every value."""
        fields = [(f"{n} {tuple(p.shape)}", p.detach().cpu().numpy().tobytes()) for n, p in self.named.items()]
        return digest_fields("kvquilt 2026-11 components v1", fields)

    def parts(self) -> Parts:
        """For a forward; shares the parameters."""
        return parts_of(self.named, self.shape.alpha)


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
