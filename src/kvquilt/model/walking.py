"""Decoder layers that each compute their own rows of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvquilt.errors import UnsupportedModelError
from kvquilt.model.rows import LayerReached, RowPlan


@contextmanager
def walking(layers: torch.nn.ModuleList, plan: RowPlan) -> Iterator[None]:
    """Let every decoder layer of this forward compute its own rows of the plan only.

    Between layers the hidden states are of all rows; a layer gets those of its active ones, with everything that goes
    by row (positions, rotary angles), and its output is put back among the others.
    """
    waiting: list[torch.Tensor] = []

    def narrow(
        index: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inner = {**kwargs, "hidden_states": args[0]} if args else kwargs
        if len(args) > 1:
            raise UnsupportedModelError(f"{type(module).__name__} takes more than its hidden states by position")
        hidden = inner["hidden_states"]
        if plan.entering is not None and plan.entering[0] == index:
            _, those, states = plan.entering
            hidden = hidden.index_copy(1, those.to(hidden.device), states.to(hidden))
        if plan.watcher is not None:
            plan.watcher.enters(index, plan, hidden)
        indices = plan.enter(index)
        if indices is not None and not len(indices) and plan.until == index:
            raise LayerReached  # nobody writes there who could end it
        if indices is None:
            return (), {**inner, "hidden_states": hidden}
        waiting.append(hidden)
        chosen = indices.to(hidden.device)
        by_row = ("position_embeddings", "position_ids")
        cut = {name: _rows_of(value, chosen, len(plan.rows)) for name, value in inner.items() if name in by_row}
        return (), {**inner, **cut, "hidden_states": hidden[:, chosen]}

    def widen(index: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        indices = plan.active.get(index)
        if indices is None:
            return None
        first = output[0] if isinstance(output, tuple) else output
        whole = waiting.pop().index_copy(1, indices.to(first.device), first)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    forwards = [layer.__dict__.get("forward") for layer in layers]  # somebody may have replaced one before
    handles = [layer.register_forward_pre_hook(partial(narrow, i), with_kwargs=True) for i, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(partial(widen, i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        for layer in layers:
            layer.__dict__["forward"] = partial(_unless_empty, layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.__dict__["forward"] = forward
        for handle in handles:
            handle.remove()


def _unless_empty(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A decoder layer's `forward`, except that no rows pass as they are: its reshapes could not take them."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return forward(*args, **kwargs) if hidden.shape[1] else hidden


def _rows_of(value: Any, chosen: torch.Tensor, rows: int) -> Any:
    """`chosen` of everything that has `rows` along its second dimension."""
    if isinstance(value, tuple | list):
        return type(value)(_rows_of(each, chosen, rows) for each in value)
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == rows:
        return value[:, chosen]
    return value
