"""The table of docs/models.md, from tiny random models: every row is what loading such a model says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as notices

from kvquilt.errors import UnsupportedModelError
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import weights_digest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.models import FAMILIES, tiny
from tests.tokenizers import chatml_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
LINEAR = {f"linear_{which}": size for which, size in (("num_key_heads", 2), ("num_value_heads", 4))}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic NTK": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 256, "rope_parameters": LONGROPE}),
    "smollm3, some layers without RoPE": ("smollm3", {"num_hidden_layers": 4}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "mixtral": ("mixtral", EXPERTS),
    "gemma2": ("gemma2", {"head_dim": 16}),
    "cohere2": ("cohere2", {"head_dim": 16}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, **EXPERTS}),
    "gpt_neox": ("gpt_neox", {}),
    "deepseek_v2 (MLA)": ("deepseek_v2", {**MLA, "num_key_value_heads": 4, "first_k_dense_replace": 2}),
    "qwen3_next": ("qwen3_next", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, **LINEAR}),
    "mamba": ("mamba", {"state_size": 8}),
    "gpt2": ("gpt2", {}),
}
INTRO = """\
# Models

What can be reused is read off a model's configuration and modules when it is loaded, never off its name; then a probe
moves keys on the model itself and compares. What does not pass is refused with the reason. `kvquilt models check MODEL`
prints the row of a real model, `kvquilt doctor MODEL` measures what reuse does to its answers.

The rows below come from tiny random models, one for each kind. A family that is not listed is judged in
the same way when it is loaded.
"""


def models_page(note: str) -> str:
    notices.set_verbosity_error()
    covered = [(name, tiny(name).capability.as_row()) for name in FAMILIES]
    refused: list[tuple[str, str]] = []
    for name, (kind, special) in MORE.items():
        try:
            covered.append((name, _load(kind, special).capability.as_row()))
        except UnsupportedModelError as error:
            refused.append((name, str(error)))
    lines = [
        note,
        "",
        INTRO,
        "## Reused",
        "",
        "| family | RoPE | rotated of head | window | notes |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {' | '.join(_cells(row))} |" for name, row in covered]
    lines += ["", "## Refused", "", "| family | reason |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in refused]
    return "\n".join(lines) + "\n"


def _load(kind: str, special: dict[str, Any]) -> LanguageModel:
    tokenizer = chatml_tokenizer()
    config = AutoConfig.for_model(kind, **{**SIZES, "vocab_size": len(tokenizer), **special})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return LanguageModel.wrap(model, tokenizer, kind, weights_digest(model))


def _cells(row: dict[str, Any]) -> list[str]:
    rotated = ", ".join(f"{width} of {row['key_dim']}" for width in row["rotary_dim"])
    windows = "yes" if row["windows"] else "-"
    return [", ".join(row["rope"]), rotated, windows, "; ".join(row["notes"]) or "-"]
