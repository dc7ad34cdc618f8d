"""The trained tensors of a writer by name: whether they go together, how large they are, what they are identified by.

Names are those of `kvquilt.model.parts.parts_of`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from kvquilt.errors import InputError, WriterError
from kvquilt.identity import Fingerprint, digest_fields, encode_ids
from kvquilt.model.parts import Parts

STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # what they may be saved as
_SOFT = ("header", "trailer")
_LAYER = re.compile(r"layers\.\d+\.[\w.]+")


def read_tensors(files: Mapping[str, bytes], name: str) -> dict[str, torch.Tensor]:
    """Those of one of a folder's files.

    Raises:
        KeyError: there is no such file.
        WriterError: it holds something else.
    """
    try:
        return load(files[name])
    except SafetensorError as error:
        raise WriterError(f"{name} is no safetensors file ({error})") from error


def copied(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In fp32, in the order of their names: training goes on with the originals."""
    return {name: t.detach().to(torch.float32, copy=True).contiguous() for name, t in sorted(named.items())}


def check_named(named: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that `parts_of` cannot make parts of.

    Raises:
        InputError: names the tensor and what is wrong with it.
    """
    for name, tensor in sorted(named.items()):
        layer, _, which = name.rpartition(".")
        other = f"{layer}.{'lora_B' if which == 'lora_A' else 'lora_A'}"
        if name not in _SOFT and not (which in ("lora_A", "lora_B") and _LAYER.fullmatch(layer)):
            raise InputError("parts", "must be header, trailer, layers.<n>.<layer>.lora_A or .lora_B", name)
        if name not in _SOFT and other not in named:
            raise InputError("parts", f"{name} is there without {other}")
        if tensor.ndim != 2 or 0 in tensor.shape:
            raise InputError("parts", f"{name} must be a matrix that is not empty", tuple(tensor.shape))
        if not bool(torch.isfinite(tensor).all()):
            raise InputError("parts", f"{name} holds NaN or is infinite")
    sizes = sizes_of(named)
    for name, tensor in sorted(named.items()):
        soft = name in _SOFT
        expected = sizes["width"] if soft else sizes["rank"]
        if tensor.shape[1 if soft or name.endswith(".lora_B") else 0] != expected:
            rule = f"{name} must be {expected} wide" if soft else f"{name} must be of rank {expected}"
            raise InputError("parts", rule, tuple(tensor.shape))


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
    first = {name: a for name, a in sorted(named.items()) if name.endswith(".lora_A")}
    return {
        **{name: len(named[name]) if name in named else 0 for name in _SOFT},
        "width": next((named[name].shape[1] for name in _SOFT if name in named), 0),
        "rank": next((len(a) for a in first.values()), 0),
        "layers": {
            name.removesuffix(".lora_A"): f"{a.shape[1]} to {len(named[name.replace('.lora_A', '.lora_B')])}"
            for name, a in first.items()
        },
    }


def moved(parts: Parts, device: torch.device) -> Parts:
    """The same with adapter and soft tokens on that device; itself where they are there already."""
    adapter, soft = parts.adapter, parts.soft
    pairs = {} if adapter is None else adapter.pairs
    if all(t.device == device for t in [*(a for a, _ in pairs.values()), *([] if soft is None else [soft])]):
        return parts
    there = {name: (a.to(device), b.to(device)) for name, (a, b) in pairs.items()}
    moved_adapter = None if adapter is None else replace(adapter, pairs=there)
    return replace(parts, adapter=moved_adapter, soft=None if soft is None else soft.to(device))


def misfit(parts: Parts, base: torch.nn.Module, width: int) -> str:
    """Why a model has no place for them; "" where it has.

    Args:
        base: what adapted layers are named below.
        width: of its embeddings.
    """
    if parts.soft is not None and parts.soft.shape[-1] != width:
        return f"header and trailer are {parts.soft.shape[-1]} wide, its embeddings {width}"
    modules = dict(base.named_modules())
    for name, (a, b) in () if parts.adapter is None else parts.adapter.pairs.items():
        layer = modules.get(name)
        sizes = (layer.in_features, layer.out_features) if isinstance(layer, torch.nn.Linear) else None
        if sizes != (a.shape[1], len(b)):
            return f"{name} is no linear layer of {a.shape[1]} inputs and {len(b)} outputs"
    return ""
