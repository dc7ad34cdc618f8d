"""For every architecture one of two outcomes: reuse as in the stock model, or a refusal that names the reason."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from kvquilt.errors import UnsupportedModelError
from kvquilt.ledger import Ledger
from kvquilt.model import capability
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rope import RotaryTable
from kvquilt.placement import place_runs
from kvquilt.reading import Reader
from kvquilt.repair.presets import METHODS
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import FAMILIES, build, model_from, tiny
from tests.oracle import close, full_prefill, pure_reuse, runs_of
from tests.tokenizers import chatml_tokenizer

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3,
    "moe_intermediate_size": 32,
}  # fmt: skip
_SHARED_KV = {
    "head_dim": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip

# configuration, its special fields, words of the refusal
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "m-rope": ("LlamaConfig", {"rope_parameters": _MROPE}, "M-RoPE"),
    "mla": ("DeepseekV3Config", _MLA, "MLA"),
    "linear attention": ("Qwen3NextConfig", {"head_dim": 16, "num_hidden_layers": 4, **_MOE, **_LINEAR}, "linear"),
    "convolution": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
    "recurrent": ("MambaConfig", {"state_size": 8}, "no rotary position embedding"),
    "soft-capping": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16}, "soft-capping"),
    "shared keys": ("Gemma3nTextConfig", _SHARED_KV, "share another layer's keys"),
    "absolute positions": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "no rotary position embedding"),
    "other module names": ("GPTNeoXConfig", {}, "no self-attention"),
    "interleaved": ("CohereConfig", {}, "do not move by their rotary table"),
    "interleaved partial": ("GlmConfig", {"head_dim": 16}, "do not move by their rotary table"),
}
COVERED: dict[str, tuple[str, dict[str, Any]]] = {
    "layers without rotation": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "multipliers": ("GraniteConfig", {}),
    "norms elsewhere": ("Olmo2Config", {}),
    "mixture of experts": ("Qwen2MoeConfig", _MOE),
    "partial rotary": ("PhiConfig", {}),
}


def make(config: str, special: dict[str, Any]) -> PreTrainedModel:
    return model_from(getattr(transformers, config), {"pad_token_id": 0, **special})


def wrap(hf: PreTrainedModel) -> LanguageModel:
    return LanguageModel.wrap(hf, chatml_tokenizer(), "tiny", "weights")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_moved_is_refused_with_the_reason(name: str) -> None:
    config, special, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        wrap(make(config, special))


def test_learned_attention_sinks_are_refused() -> None:
    hf = build("llama")
    hf.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(UnsupportedModelError, match="layer 1 has learned attention sinks"):
        wrap(hf)


def test_an_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        wrap(transformers.AutoModelForSeq2SeqLM.from_config(config))


@pytest.mark.parametrize("name", COVERED)
def test_what_is_not_refused_equals_the_stock_model_at_both_ends(name: str) -> None:
    model, untouched = wrap(make(*COVERED[name])), make(*COVERED[name])
    placement = place_runs(runs_of("iAiBi", (7, 11, 3, 30, 9)))
    reader = Reader(model, Store.open(None, 1 << 28), Isolated(), ())
    for method, truth in (
        ("full", full_prefill(untouched, placement.ids)[-9:]),
        ("none", pure_reuse(untouched, placement)),
    ):
        out, cache = reader.read(placement, METHODS[method], None, Ledger(), 0, 9)
        model.pool.release(cache)
        assert close(out, truth)


def test_attention_that_adds_a_mask_of_its_own_is_refused() -> None:
    """Doge learns a bias per key; with the zeros of a fresh model it is plain attention, so make it count."""
    hf = make("DogeConfig", {})
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.A.fill_(1.0)
    with pytest.raises(UnsupportedModelError, match="not plain causal attention"):
        wrap(hf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_passes_the_probe(family: str, dtype: torch.dtype) -> None:
    model = wrap(build(family).to(dtype))
    assert model.dtype == dtype
    assert model.pool.lent == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_row_of_a_family_says_what_it_is(family: str) -> None:
    row = tiny(family).capability.as_row()
    rope = {"llama-linear": "linear", "llama-llama3": "llama3", "llama-yarn": "yarn"}.get(family, "default")
    windowed = family in ("mistral-window", "gemma3")
    assert (row["rope"], row["windows"], row["max_length"]) == ([rope], [24] if windowed else [], 1024)
    assert row["rotary_dim"] == [8 if family == "phi3-partial" else 16]
    assert json.loads(json.dumps(row)) == row


def test_layer_types_have_tables_and_windows_of_their_own() -> None:
    c = tiny("gemma3").capability
    assert c.windows == (24, 24, None)
    local, again, everywhere = c.tables
    assert local is again
    assert local is not None
    assert everywhere is not None
    assert not torch.equal(local.inv_freq, everywhere.inv_freq), "gemma3 has two thetas"


def _other_theta(table: RotaryTable) -> RotaryTable:
    return RotaryTable(table.inv_freq**1.1)


class _Swapped(RotaryTable):
    """Turns the halves the other way round."""

    def rotate(self, keys: torch.Tensor, delta: int, out: torch.Tensor) -> None:
        RotaryTable(self.inv_freq).rotate(keys, -delta, out)


class _ScaledTwice(RotaryTable):
    """Applies YaRN's attention scaling to keys that carry it already."""

    def rotate(self, keys: torch.Tensor, delta: int, out: torch.Tensor) -> None:
        RotaryTable(self.inv_freq).rotate(keys, delta, out)
        out.mul_(1.2079)


WRONG = {
    "theta": _other_theta,
    "halves": lambda table: _Swapped(table.inv_freq),
    "scaling": lambda table: _ScaledTwice(table.inv_freq),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("family", ["llama", "llama-yarn", "gemma3"])
def test_a_wrong_rotation_is_refused_when_the_model_is_taken_over(
    monkeypatch: pytest.MonkeyPatch, family: str, fault: str
) -> None:
    inspect = capability.inspect

    def planted(hf: PreTrainedModel) -> capability.Capability:
        found = inspect(hf)
        return dataclasses.replace(found, tables=(*found.tables[:-1], WRONG[fault](found.tables[-1])))  # type: ignore[arg-type]

    monkeypatch.setattr("kvquilt.model.language_model.inspect", planted)
    with pytest.raises(UnsupportedModelError, match="keys of layer 2 do not move"):
        wrap(build(family))
