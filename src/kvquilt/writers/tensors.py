"""The trained tensors of a writer by name: whether they go together, how large they are, what they are identified by.

Names are those of `kvquilt.model.parts.parts_of`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from kvquilt.errors import InputError
from kvquilt.identity import Fingerprint, digest_fields, encode_ids
from kvquilt.model.parts import Adapter, Parts

STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # what they may be saved as
_SOFT = ("header", "trailer")
_LAYER = re.compile(r"layers\.\d+\.[\w.]+")


def check_named(named: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that `parts_of` cannot make parts of.

    Raises:
        InputError: names the tensor and what is wrong with it.
    """
    first = {name: len(a) for name, a in named.items() if name.endswith(".lora_A")}
    width = next((t.shape[-1] for name, t in named.items() if name in _SOFT), 0)
    for name, tensor in named.items():
        shape = tuple(tensor.shape)
        if tensor.ndim != 2 or 0 in shape:
            raise InputError("parts", f"{name} must be a matrix that is not empty", shape)
        if not bool(torch.isfinite(tensor).all()):
            raise InputError("parts", f"{name} holds NaN or is infinite")
        if name in _SOFT:
            if shape[1] != width:
                raise InputError("parts", f"header and trailer must be {width} wide", shape)
            continue
        layer, _, which = name.rpartition(".")
        other = f"{layer}.{'lora_B' if which == 'lora_A' else 'lora_A'}"
        if which not in ("lora_A", "lora_B") or not _LAYER.fullmatch(layer):
            raise InputError("parts", "must be header, trailer, layers.<n>.<layer>.lora_A or .lora_B", name)
        if other not in named:
            raise InputError("parts", f"{name} is there without {other}")
        rank = next(iter(first.values()))
        if shape[0 if which == "lora_A" else 1] != rank:
            raise InputError("parts", f"{name} must be of rank {rank}", shape)


def content_digest(
    kind: str, base: Fingerprint, named: Mapping[str, torch.Tensor], alpha: float, prefix: tuple[int, ...]
) -> str:
    """Over everything that what it compiles depends on; tensors count by their values in fp32."""
    parts: list[tuple[str, bytes | str | None]] = [
        ("kind", kind),
        ("base", base.digest),
        ("prefix", encode_ids(prefix)),
        ("alpha", repr(float(alpha))),
    ]
    parts += [(f"{name} {tuple(t.shape)}", t.float().cpu().numpy().tobytes()) for name, t in sorted(named.items())]
    return digest_fields("kvquilt 2026-11 writer trained v1", parts)


def sizes_of(named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Rows of soft tokens and their width, rank, and for every adapted layer its inputs and outputs."""
    soft = {name: len(named[name]) if name in named else 0 for name in _SOFT}
    layers = {
        name.removesuffix(".lora_A"): [a.shape[1], len(named[name.replace(".lora_A", ".lora_B")])]
        for name, a in named.items()
        if name.endswith(".lora_A")
    }
    rank = next((len(a) for name, a in named.items() if name.endswith(".lora_A")), 0)
    width = next((t.shape[1] for name, t in named.items() if name in _SOFT), 0)
    return {**soft, "width": width, "rank": rank, "layers": dict(sorted(layers.items()))}


def moved(parts: Parts, device: torch.device) -> Parts:
    """The same on that device; itself where it is there already."""
    adapter, soft = parts.adapter, parts.soft
    pairs = adapter.pairs if isinstance(adapter, Adapter) else {}
    if all(t.device == device for t in [*(a for a, _ in pairs.values()), *([] if soft is None else [soft])]):
        return parts
    there = {name: (a.to(device), b.to(device)) for name, (a, b) in pairs.items()}
    scaling = adapter.scaling if isinstance(adapter, Adapter) else 0.0
    return Parts(Adapter(there, scaling) if there else None, None if soft is None else soft.to(device))
