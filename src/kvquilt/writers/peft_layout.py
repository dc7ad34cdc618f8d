"""LoRA in PEFT's own layout, without PEFT: names of its tensors, and its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from kvquilt.errors import WriterError
from kvquilt.writers.folder import CONFIG

_BEFORE = "base_model.model.model."  # PEFT's wrapper, its model, and the base model inside the causal one
# what does not change the products of a trained adapter; every field beyond those here and in `_settings` must be off
_IMMATERIAL = {
    *("base_model_name_or_path", "auto_mapping", "inference_mode", "lora_dropout", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "task_type"),
}


def to_peft(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's tensors under PEFT's names.

    Args:
        named: as in `kvquilt.model.parts.parts_of`; soft tokens are left out.
    """
    return {f"{_BEFORE}{name}.weight": tensor for name, tensor in named.items() if ".lora_" in name}


def from_peft(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse of `to_peft`.

    Raises:
        WriterError: a tensor that is no plain LoRA matrix of a decoder layer.
    """
    named = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix(_BEFORE).removesuffix(".weight")
        if f"{_BEFORE}{inner}.weight" != name or not inner.endswith((".lora_A", ".lora_B")):
            raise WriterError(f"the adapter holds {name}, which is no LoRA matrix of a decoder layer")
        named[inner] = tensor
    return named


def config_text(named: Mapping[str, torch.Tensor], alpha: float, base_name: str) -> str:
    """``adapter_config.json`` of the adapter."""
    fields = {
        **_settings(named, alpha),
        "alpha_pattern": {},
        "base_model_name_or_path": base_name,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "rank_pattern": {},
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def check_config(text: bytes, named: Mapping[str, torch.Tensor], alpha: float) -> None:
    """Refuse a configuration that means something else than `kvquilt.model.parts.Adapter` computes.

    Raises:
        WriterError: says which field.
    """
    try:
        config: dict[str, Any] = dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise WriterError(f"{CONFIG} is no JSON object") from error
    settings = _settings(named, alpha)
    for name, value in sorted(config.items()):
        if value and name not in _IMMATERIAL | settings.keys():
            raise WriterError(f"{CONFIG}: {name} is {value!r}; what it stands for is not implemented, plain LoRA is")
    for name, expected in settings.items():
        got = config.get(name)
        if (sorted(map(str, got)) if isinstance(got, list) else got) != expected:
            raise WriterError(f"{CONFIG}: {name} is {got!r}, but must be {expected!r} for this adapter")


def _settings(named: Mapping[str, torch.Tensor], alpha: float) -> dict[str, Any]:
    """The fields that say what is computed."""
    adapted = sorted(name.removesuffix(".lora_A") for name in named if name.endswith(".lora_A"))
    layers: dict[str, set[str]] = {}
    for name in adapted:
        _, layer, inner = name.split(".", 2)
        layers.setdefault(layer, set()).add(inner)
    everywhere = {str(n) for n in range(len(layers))} == set(layers) and len(set(map(frozenset, layers.values()))) == 1
    # PEFT takes a last name as all layers of that name; where some lack the adapter, every one is named in full
    targets = sorted({name.rsplit(".", 1)[1] for name in adapted}) if everywhere else adapted
    return {
        "peft_type": "LORA",
        "r": len(named[f"{adapted[0]}.lora_A"]),
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "target_modules": targets,
        "bias": "none",
        "init_lora_weights": True,  # some other starts alter the base model's weights
    }
