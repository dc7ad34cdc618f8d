"""Tiny random models of every covered family, built from configurations; no files, no network."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import weights_digest
from tests.tokenizers import chatml_tokenizer

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    # random weights of the default size attend almost uniformly and would hide a wrong mask
    "initializer_range": 0.15,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 128}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-llama3": (LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": _YARN}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "mistral-window": (MistralConfig, {"sliding_window": 24, "head_dim": 16}),
    "phi3": (Phi3Config, {"pad_token_id": 0}),
    "phi3-partial": (Phi3Config, {"pad_token_id": 0, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 16, "sliding_window": 24, "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}),
}  # fmt: skip


def build(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A stock transformers model with random fp32 weights; same seed, same weights."""
    kind, special = FAMILIES[family]
    return model_from(kind, {**special, **overrides}, seed)


def model_from(kind: type[PreTrainedConfig], special: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A stock model of any architecture in the tests' size, with the fields of `special`."""
    settings = {**_BASE, "vocab_size": len(chatml_tokenizer()), **special}
    settings.update(bos_token_id=0, eos_token_id=1)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(kind(**settings), dtype=torch.float32).eval()


@functools.cache
def tiny(family: str = "llama", seed: int = 0) -> LanguageModel:
    """The same model wrapped; shared by tests, which must not change it."""
    hf = build(family, seed)
    return LanguageModel.wrap(hf, chatml_tokenizer(), f"tiny-{family}", weights_digest(hf))
