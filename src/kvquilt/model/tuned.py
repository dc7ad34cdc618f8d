"""A model whose weights were trained: another model, beside the one it came from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain

import torch

from kvquilt.identity import digest_fields
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts


def merged(model: LanguageModel, parts: Parts, content: str) -> LanguageModel:
    """The model with an adapter's products added to its weights, or with whole weights in their place.

    Weights that do not change are shared by both models; `model` stays as it is. Sums are fp32, rounded once.

    Args:
        content: digest of `parts`. With the model's own it is the digest of the new weights, so that nothing that was
            compiled by the one is taken for the other's.
    """
    with model.alone(), torch.no_grad():
        shared = chain(model.hf.parameters(), model.hf.buffers())
        hf = copy.deepcopy(model.hf, {id(tensor): tensor for tensor in shared})
        base = hf.base_model
        for name, weight in _changed(base, parts).items():
            module, _, leaf = name.rpartition(".")
            base.get_submodule(module).register_parameter(leaf, torch.nn.Parameter(weight))
    weights = [("base", model.fingerprint.weights), ("content", content)]
    digest = digest_fields("kvquilt 2026-11 tuned weights v1", weights)
    return LanguageModel.wrap(hf, model.tokenizer, f"{model.name} (block-tuned)", digest)


def _changed(base: torch.nn.Module, parts: Parts) -> Mapping[str, torch.Tensor]:
    """By name below the base model, in its dtype and on its device."""
    new: dict[str, torch.Tensor] = {}
    if parts.weights is not None:
        new |= parts.weights.named
    if parts.adapter is not None:
        for name, (a, b) in parts.adapter.pairs.items():
            own = base.get_parameter(f"{name}.weight")
            product = b.to(own.device, torch.float32) @ a.to(own.device, torch.float32)
            new[f"{name}.weight"] = own.float() + parts.adapter.scaling * product
    return {
        name: tensor.to(own.device, own.dtype) for name, tensor in new.items() for own in [base.get_parameter(name)]
    }
