"""Gated cross-attention in front of some decoder layers, to documents without positions (COMB, arXiv 2602.01519)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from kvquilt.model.rows import Pair

_EPS = 1e-6


@dataclass(frozen=True, eq=False, slots=True)
class CrossAttention:
    """Cross layers and what they look at: on for one forward, by hooks that are always removed.

    A layer adds tanh(gate) times attention to the memory, then tanh(gate) times an MLP, to what enters its decoder
    layer. Keys and queries are normed and not rotated, so the memory has no order. Gates of 0, and no memory, are the
    plain model.

    Attributes:
        every: one layer before each decoder layer ``every - 1``, ``2 every - 1``, ...
        named: fp32 masters, or copies in the model's dtype; products run in the model's dtype. For each n:
            ``cross.n.norm`` ``[width]``, ``.q_proj`` ``[heads * dim, width]``, ``.q_norm``, ``.k_norm`` ``[dim]``,
            ``.o_proj`` ``[width, heads * dim]``, ``.gate`` ``[1]``, ``.mlp_norm`` ``[width]``, ``.gate_proj``,
            ``.up_proj`` ``[inner, width]``, ``.down_proj`` ``[width, inner]``, ``.mlp_gate`` ``[1]``. May hold others.
        memory: keys, normed, and values ``[layers, kv_heads, tokens, dim]``; None looks at nothing.
    """

    every: int
    named: Mapping[str, torch.Tensor]
    memory: Pair | None = None

    @property
    def layers(self) -> int:
        return sum(name.startswith("cross.") and name.endswith(".q_proj") for name in self.named)

    @property
    def dim(self) -> int:
        """Of keys and values of one head."""
        return len(self.named["cross.0.q_norm"])

    @property
    def tokens(self) -> int:
        """Tokens in the memory."""
        return 0 if self.memory is None else int(self.memory[0].shape[2])

    def over(self, keys: torch.Tensor, values: torch.Tensor) -> CrossAttention:
        """The same layers over keys and values ``[layers, kv_heads, tokens, dim]`` as an encoder gives them."""
        ready = [normed(each, self.named[f"cross.{n}.k_norm"]) for n, each in enumerate(keys)]
        return replace(self, memory=(torch.stack(ready), values))

    def flops(self, rows: int) -> float:
        """Operations for so many rows: weights and attention."""
        if self.memory is None:
            return 0.0
        weights = sum(tensor.numel() for name, tensor in self.named.items() if name.startswith("cross."))
        queries = sum(len(tensor) for name, tensor in self.named.items() if name.endswith(".q_proj"))
        return rows * (2.0 * weights + 4.0 * queries * self.tokens)

    @contextmanager
    def on(self, base: torch.nn.Module) -> Iterator[None]:
        """Put the layers in front of the decoder layers of the base model inside the block; no weight is touched."""
        handles = []
        layers: Any = base.layers
        try:
            for n in range(self.layers if self.memory is not None else 0):
                at = layers[(n + 1) * self.every - 1]
                handles.append(at.register_forward_pre_hook(self._entering(n), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, layer: int) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
        def enter(
            module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (self._passed(layer, args[0]), *args[1:]), kwargs
            return (), {**kwargs, "hidden_states": self._passed(layer, kwargs["hidden_states"])}

        return enter

    def _passed(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """``[batch, rows, width]`` behind a cross layer."""
        own = {
            name: self.named[f"cross.{layer}.{name}"].to(hidden.dtype)
            for name in ("q_proj", "o_proj", "gate", "gate_proj", "up_proj", "down_proj", "mlp_gate")
        }
        norms = {name: self.named[f"cross.{layer}.{name}"] for name in ("norm", "q_norm", "mlp_norm")}
        query = linear(normed(hidden, norms["norm"]), own["q_proj"]).unflatten(-1, (-1, len(norms["q_norm"])))
        looked = self._attended(layer, normed(query, norms["q_norm"]))
        hidden = hidden + own["gate"].tanh() * linear(looked, own["o_proj"])
        inner = normed(hidden, norms["mlp_norm"])
        inner = silu(linear(inner, own["gate_proj"])) * linear(inner, own["up_proj"])
        return hidden + own["mlp_gate"].tanh() * linear(inner, own["down_proj"])

    def _attended(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """``[batch, rows, heads * dim]`` of queries ``[batch, rows, heads, dim]``: every row sees all of the memory."""
        assert self.memory is not None  # else no hook runs
        keys, values = (each[layer] for each in self.memory)
        batch, rows, heads, dim = query.shape
        # no mask, so batch, rows and a group's heads are all alike: one product per key-value head
        folded = query.unflatten(2, (len(keys), -1)).permute(2, 0, 1, 3, 4).reshape(1, len(keys), -1, dim)
        out = scaled_dot_product_attention(folded, keys[None], values[None])[0]
        out = out.reshape(len(keys), batch, rows, heads // len(keys), dim)
        return out.permute(1, 2, 0, 3, 4).reshape(batch, rows, heads * dim)


def normed(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root mean square norm over the last dimension, in fp32."""
    return rms_norm(states.float(), states.shape[-1:], weight.float(), _EPS).to(states.dtype)
