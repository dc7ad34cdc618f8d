"""What of a model's cache can be moved, read off its configuration and modules, and what cannot, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvquilt.errors import UnsupportedModelError
from kvquilt.model.rope import RotaryTable

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_WITHOUT_POSITIONS = ("linear", "conv", "mamba", "recurrent", "ssm")


@dataclass(frozen=True, slots=True)
class Capability:
    """One row of `docs/models.md`.

    Attributes:
        max_length: tokens of prompt and answer together that can be placed; below the model's own context where
            its rotary table changes with the length.
        windows: per layer, the sliding window in tokens or ``None``.
        tables: per layer, the rotary table or ``None`` for a layer without rotation. Layers of one type share one.
        notes: what a user should know.
        bound: the note that tells why `max_length` is not the model's own context; "" if it is.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    max_length: int
    rope: tuple[str, ...]
    windows: tuple[int | None, ...]
    tables: tuple[RotaryTable | None, ...]
    notes: tuple[str, ...]
    bound: str = ""

    def as_row(self) -> dict[str, Any]:
        """The row of `kvquilt models check`, ready for JSON."""
        windows = sorted({w for w in self.windows if w is not None})
        rotary = sorted({t.rotary_dim for t in self.tables if t is not None})
        return {
            "architecture": self.architecture,
            "reusable": True,
            "rope": list(self.rope),
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "key_dim": self.key_dim,
            "rotary_dim": rotary,
            "windows": windows,
            "max_length": self.max_length,
            "notes": list(self.notes),
        }


def inspect(model: PreTrainedModel) -> Capability:
    """Describe `model`.

    Raises:
        UnsupportedModelError: its caches cannot be placed at another position; the message names the feature.
    """
    config = model.config.get_text_config()
    _refuse(config)
    layers = getattr(model.base_model, "layers", None)
    rotary = getattr(model.base_model, "rotary_emb", None)
    if layers is None or rotary is None:
        raise UnsupportedModelError(f"{type(model).__name__}: no decoder layers with a rotary embedding were found")
    types = _layer_types(config, len(layers))
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    for i, attention in enumerate(attentions):
        if attention is None:
            raise UnsupportedModelError(
                f"layer {i} has no self-attention named `self_attn`: it is recurrent or has another layout"
            )
        if getattr(attention, "sinks", None) is not None:
            raise UnsupportedModelError(f"layer {i} has learned attention sinks, which are not implemented here")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    uniform = getattr(config, "layer_types", None) is None
    windows = tuple(window if uniform or t == "sliding_attention" else None for t in types)
    tables = _tables(rotary, types, attentions)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    max_length, notes, bound = _limits(config)
    return Capability(
        architecture=type(model).__name__,
        layers=len(layers),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        key_dim=dim,
        value_dim=getattr(config, "v_head_dim", None) or dim,
        max_length=max_length,
        rope=tuple(sorted({p["rope_type"] for p in _rope_parameters(config)})),
        windows=windows,
        tables=tables,
        notes=notes,
        bound=bound,
    )


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One dictionary per rotary table: configurations nest them by layer type where types differ."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise UnsupportedModelError("the configuration has no rotary position embedding, so keys cannot be moved")
    nested = [v for v in parameters.values() if isinstance(v, dict)]
    return nested or [parameters]


def _refuse(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("encoder-decoder models are not covered")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError("latent attention (MLA) caches a compressed state, not keys that can be rotated")
    if getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModelError("attention logit soft-capping is not implemented here")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError("some layers share another layer's keys, which is not implemented here")
    for parameters in _rope_parameters(config):
        if parameters.get("mrope_section"):
            raise UnsupportedModelError("multi-axis RoPE (M-RoPE): a text offset does not move its keys")


def _layer_types(config: Any, count: int) -> list[str]:
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    unknown = sorted(set(types) - _KNOWN_LAYERS)
    if unknown:
        stateful = all(any(word in kind for word in _WITHOUT_POSITIONS) for kind in unknown)
        reason = "linear or recurrent state has no positions" if stateful else "not implemented here"
        raise UnsupportedModelError(f"layers of type {', '.join(unknown)}: {reason}")
    return types


def _tables(rotary: torch.nn.Module, types: list[str], attentions: list[Any]) -> tuple[RotaryTable | None, ...]:
    """One shared table per layer type; the plain inv_freq, since attention scaling is in the keys already."""
    made: dict[str, RotaryTable] = {}
    for kind in set(types):
        buffer = getattr(rotary, f"{kind}_inv_freq", None)
        frequencies = buffer if buffer is not None else getattr(rotary, "inv_freq", None)
        if frequencies is None:
            raise UnsupportedModelError(f"no rotary table for layers of type {kind}")
        made[kind] = RotaryTable(frequencies.detach().float())
    unrotated = [getattr(a, "use_rope", True) in (False, 0) for a in attentions]
    return tuple(None if off else made[kind] for kind, off in zip(types, unrotated, strict=True))


def _limits(config: Any) -> tuple[int, tuple[str, ...], str]:
    """Longest placement whose rotary table is one and the same, remarks, and the one on that bound."""
    limit, notes, bound = int(config.max_position_embeddings), [], ""
    for p in _rope_parameters(config):
        kind, original = p["rope_type"], p.get("original_max_position_embeddings")
        if kind in ("dynamic", "longrope"):
            # longer prompts use another table, which a stored key cannot be rotated into
            limit = min(limit, int(original or config.max_position_embeddings))
            bound = f"{kind} RoPE: reusable up to {limit} tokens, where the table is constant; refused beyond"
            notes.append(bound)
        if p.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            notes.append(f"partial rotary {p['partial_rotary_factor']}")
        if kind == "yarn":
            notes.append("attention scaling is part of the stored keys and not applied again")
    return limit, tuple(dict.fromkeys(notes)), bound
