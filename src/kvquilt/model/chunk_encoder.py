"""A bidirectional encoder of documents made of decoder layers, with gradients (COMB, arXiv 2602.01519)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.functional import linear

from kvquilt.model.cross_attention import CrossAttention, normed
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import LayerReached, Pair


def encode(model: LanguageModel, ids: torch.Tensor, lengths: Sequence[int], cross: CrossAttention) -> Pair:
    """Keys, not rotated, and values ``[layers, batch, kv_heads, tokens, dim]`` of documents padded to the right.

    The frozen embedding table, then decoder layers of the model's own kind with other weights, in which every token
    sees its whole document at rotary positions from 0; behind each of them a norm and two projections give the pair of
    one cross layer. The caller holds the model alone.

    Args:
        ids: ``[batch, tokens]`` int64; `lengths` of them are real.
        cross: also names, for each of its layers, ``encoder.n.<name within a decoder layer>``, ``memory.n.norm``
            ``[width]``, ``memory.n.k_proj`` and ``.v_proj`` ``[kv_heads * dim, width]``.
    """
    base: Any = model.hf.base_model
    named = cross.named
    weights = {
        name.replace("encoder.", "layers.", 1): tensor.to(model.dtype)
        for name, tensor in named.items()
        if name.startswith("encoder.")
    }
    padding = torch.arange(ids.shape[1]) >= torch.tensor(lengths)[:, None]
    mask = torch.zeros(ids.shape, dtype=model.dtype).masked_fill_(padding, torch.finfo(model.dtype).min)
    seen = mask.to(model.device)[:, None, None].expand(-1, 1, ids.shape[1], -1)
    with _as_encoder(base.layers[: cross.layers], seen) as left, suppress(LayerReached):
        embeddings = model.hf.get_input_embeddings()(ids.to(model.device))
        functional_call(base, weights, (), {"inputs_embeds": embeddings, "use_cache": False})
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for n, hidden in enumerate(left):
        ready = normed(hidden, named[f"memory.{n}.norm"])
        for projection, out in (("k_proj", keys), ("v_proj", values)):
            states = linear(ready, named[f"memory.{n}.{projection}"].to(hidden.dtype))
            out.append(states.unflatten(-1, (-1, cross.dim)).transpose(1, 2))
    return torch.stack(keys), torch.stack(values)


@contextmanager
def _as_encoder(layers: Sequence[torch.nn.Module], mask: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Every layer sees what `mask` lets it see; the forward ends behind the last. What left each of them."""
    left: list[torch.Tensor] = []

    def enter(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "attention_mask": mask}

    def leave(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        left.append(output[0] if isinstance(output, tuple) else output)
        if len(left) == len(layers):
            raise LayerReached

    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    try:
        yield left
    finally:
        for handle in handles:
            handle.remove()
