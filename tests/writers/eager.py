"""What a stock model attends to: the oracle for everything that is noted about attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tests.models import build


@functools.cache
def _eager(family: str) -> PreTrainedModel:
    model = build(family)
    model.set_attn_implementation("eager")
    return model


@torch.inference_mode()
def attention_maps(family: str, ids: Sequence[int]) -> torch.Tensor:
    """``[layers, heads, n, n]`` fp64, of a model that kvquilt never touched."""
    out = _eager(family)(input_ids=torch.tensor([list(ids)]), output_attentions=True, use_cache=False)
    return torch.cat(out.attentions).double()


@torch.inference_mode()
def hidden_states(family: str, ids: Sequence[int]) -> torch.Tensor:
    """``[layers + 1, n, width]``: what enters every layer, and what leaves the last one normalised."""
    out = _eager(family)(input_ids=torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    return torch.cat(out.hidden_states)
