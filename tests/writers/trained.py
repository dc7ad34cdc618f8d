"""Trained writers with random weights, of every kind and shape, for models of `tests.models`."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from kvquilt.model.language_model import LanguageModel
from kvquilt.training.encoder import EncoderShape
from kvquilt.training.shape import TARGETS, linear_layers
from kvquilt.writers.artefact import make_writer
from kvquilt.writers.encoder import Encoder, make_encoder
from kvquilt.writers.link_tokens import LinkTokens
from kvquilt.writers.loaded import Usable
from kvquilt.writers.trained import Trained

PHI3 = ("qkv_proj", "o_proj")
# kind: rank, header, trailer
SHAPES = {
    "kv-packet": (0, 3, 2),
    "sempic": (4, 0, 0),
    "joint": (2, 2, 3),
}


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def equal(one: Trained, two: Trained) -> bool:
    a, b = one.named(), two.named()
    return one == two and list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def targets_of(model: LanguageModel) -> tuple[str, ...]:
    return PHI3 if "phi3" in model.name else TARGETS


def random_parts(
    model: LanguageModel, rank: int, header: int, trailer: int, seed: int = 0, targets: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Tensors that change what is compiled by a lot, none of them zero."""
    draw = torch.Generator().manual_seed(seed)
    named = {}
    for name, rows in (("header", header), ("trailer", trailer)):
        if rows:
            named[name] = torch.randn(rows, model.hf.config.hidden_size, generator=draw) * 0.3
    for name, layer in linear_layers(model, targets or targets_of(model)) if rank else ():
        named[f"{name}.lora_A"] = torch.randn(rank, layer.in_features, generator=draw) * 0.2
        named[f"{name}.lora_B"] = torch.randn(layer.out_features, rank, generator=draw) * 0.2
    return named


def random_writer(
    model: LanguageModel, kind: str = "joint", prefix: tuple[int, ...] = (), seed: int = 0, alpha: float = 4.0
) -> Trained:
    named = random_parts(model, *SHAPES[kind], seed)
    return make_writer(kind, model.fingerprint, named, alpha, prefix, model.name)


def random_links(model: LanguageModel, seed: int = 0) -> LinkTokens:
    width = model.hf.config.hidden_size
    drawn = torch.randn(1, 2, width, generator=torch.Generator().manual_seed(seed)) * 0.3
    return LinkTokens.of(model.fingerprint, drawn, base_name=model.name)


def random_encoder(model: LanguageModel, gates: float = 0.7, every: int = 1, seed: int = 0) -> Encoder:
    """Whose cross layers change a lot, unless the gates are 0."""
    named = EncoderShape(every).drawn(model, seed)
    for name in named:
        if name.endswith("gate"):
            named[name].fill_(gates)
    return make_encoder(model.fingerprint, named, every, model.name)


@functools.cache
def random_writers(model: LanguageModel) -> dict[str, Usable]:
    """One of each kind, by kind; shared by tests, which must not change it."""
    made: dict[str, Usable] = {kind: random_writer(model, kind) for kind in SHAPES}
    return made | {"link-tokens": random_links(model), "encoder": random_encoder(model)}
