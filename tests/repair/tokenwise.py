"""A repair pass without a mask, a gather or a scatter: a stock model, one token at a time.

Every computed token is a forward of its own through all layers, behind a stock cache that holds just the keys and
values that this token may see, and is thrown away afterwards. Slow, and too simple to be wrong as an operator can be.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvquilt.placement import Placement
from tests.oracle import _segment

Slots = list[tuple[torch.Tensor, torch.Tensor]]  # by layer: keys and values [kv_heads, tokens, dim]


def stored(hf: PreTrainedModel, placement: Placement, prefix: Sequence[int] = ()) -> Slots:
    """What the slots hold before the pass: documents as encoded where they stand, behind `prefix`; NaN elsewhere."""
    parts: list[Slots] = []
    for run, position in zip(placement.runs, placement.positions, strict=True):
        made = _segment(hf, run.ids, position, prefix)
        scale = 1.0 if run.document is not None else float("nan")
        parts.append([(k[0] * scale, v[0] * scale) for k, v in made])
    return [
        (torch.cat([p[n][0] for p in parts], 1), torch.cat([p[n][1] for p in parts], 1)) for n in range(len(parts[0]))
    ]


@torch.inference_mode()
def walk(
    hf: PreTrainedModel,
    ids: Sequence[int],
    slots: Slots,
    computed: torch.Tensor,
    *,
    positions: Sequence[int] | None = None,
    visible: torch.Tensor | None = None,
    entering: tuple[int, dict[int, torch.Tensor]] | None = None,
) -> tuple[dict[int, torch.Tensor], Slots]:
    """Logits ``[vocabulary]`` of every computed token, and the slots afterwards.

    Args:
        computed: ``[layers, tokens]`` bool. A token that sits a layer out keeps its state and its old keys there.
        positions: of every token; by default its number.
        visible: ``[layers, tokens]`` bool, what others than the token itself may see.
        entering: a layer, and by token the state ``[width]`` with which it enters that layer.
    """
    plain = _without_window(hf)
    where = list(range(len(ids))) if positions is None else list(positions)
    at = torch.tensor(where)
    now = [(k.clone(), v.clone()) for k, v in slots]
    out: dict[int, torch.Tensor] = {}
    for token in computed.any(0).nonzero()[:, 0].tolist():
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(now):
            sees = torch.arange(len(ids)) < token
            if visible is not None:
                sees &= visible[layer]
            if (window := _window(hf, layer)) is not None:
                sees &= at > where[token] - window
            cache.update(keys[None, :, sees], values[None, :, sees], layer)
        state = None if entering is None else entering[1].get(token)
        handles = _sitting_out(plain, computed[:, token].tolist())
        if entering is not None and state is not None:
            handles.append(
                plain.base_model.layers[entering[0]].register_forward_pre_hook(_replaced(state), with_kwargs=True)
            )
        try:
            logits = plain(
                input_ids=torch.tensor([[ids[token]]]), position_ids=at[None, token : token + 1], cache=cache,
                use_cache=True,
            ).logits  # fmt: skip
        finally:
            for handle in handles:
                handle.remove()
        for layer, (keys, values) in enumerate(now):
            if computed[layer, token]:
                keys[:, token] = cache.layers[layer].keys[0, :, -1]
                values[:, token] = cache.layers[layer].values[0, :, -1]
        out[token] = logits[0, 0].float()
    return out, now


@functools.cache
def _without_window(hf: PreTrainedModel) -> PreTrainedModel:
    """The same model, whose layers see all they are given: its own window would count tokens, not positions."""
    plain = copy.deepcopy(hf)
    for module in plain.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = plain.config.max_position_embeddings
    if getattr(plain.config, "sliding_window", None) is not None:
        plain.config.sliding_window = plain.config.max_position_embeddings
    return plain


def _window(hf: PreTrainedModel, layer: int) -> int | None:
    window: int | None = getattr(hf.base_model.layers[layer].self_attn, "sliding_window", None)
    return window


def _sitting_out(hf: PreTrainedModel, computes: list[bool]) -> list[Any]:
    """Layers that the token does not pass return what they were given."""

    def unchanged(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    skipped = [layer for layer, on in zip(hf.base_model.layers, computes, strict=True) if not on]
    return [layer.register_forward_hook(unchanged, with_kwargs=True) for layer in skipped]


def _replaced(state: torch.Tensor) -> Callable[..., Any]:
    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (state[None, None], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": state[None, None]}

    return enter
