"""Trained additions to a frozen model: adapters, soft tokens, cross layers, on for one forward and never left on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from kvquilt.errors import IntegrityError
from kvquilt.model.cross_attention import CrossAttention
from kvquilt.model.weights import Weights

SOFT = 1 << 30  # an id from here on is no token: id - SOFT is a row of `Parts.soft`


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """LoRA (arXiv 2106.09685): every named linear layer W x becomes W x + scaling B A x.

    Attributes:
        pairs: by name of the linear layer below the base model (``layers.0.self_attn.q_proj``), A ``[rank, in]`` and
            B ``[out, rank]``; fp32 masters, products run in the model's dtype.
        scaling: alpha / rank.
    """

    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    scaling: float

    @contextmanager
    def on(self, base: torch.nn.Module, within: str = "") -> Iterator[None]:
        """Add the products inside the block, by hooks that are always removed: no weight is touched.

        Args:
            within: only for layers whose name begins so.
        """
        named = [name for name in self.pairs if name.startswith(within)]
        handles = []
        try:
            for name in named:
                a, b = self.pairs[name]
                handles.append(base.get_submodule(name).register_forward_hook(_adding(a, b, self.scaling)))
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True, eq=False, slots=True)
class Parts:
    """What one forward has beside the model.

    Attributes:
        adapter: on the model's linear layers.
        soft: ``[n, width]`` fp32, embeddings that the ids ``SOFT .. SOFT + n - 1`` stand for.
        cross: layers of their own, and documents that they look at.
        weights: in place of the model's own.
    """

    adapter: Adapter | None = None
    soft: torch.Tensor | None = None
    cross: CrossAttention | None = None
    weights: Weights | None = None

    @contextmanager
    def on(self, base: torch.nn.Module, within: str = "") -> Iterator[None]:
        """Everything but the soft tokens, for the forwards inside the block.

        Args:
            within: only for layers whose name begins so; cross layers stand between them and are left out then.
        """
        with ExitStack() as stack:
            for part in (self.adapter, self.weights):
                if part is not None:
                    stack.enter_context(part.on(base, within))
            if self.cross is not None and not within:
                stack.enter_context(self.cross.on(base))
            yield


PLAIN = Parts()


def parts_of(named: Mapping[str, torch.Tensor], alpha: float) -> Parts:
    """`Parts` that share the named tensors; soft rows are the header's, then the trailer's.

    Args:
        named: ``header`` ``[h, width]``, ``trailer`` ``[t, width]``, and for every adapted layer, named as below the
            base model, ``<name>.lora_A`` ``[rank, in]`` and ``<name>.lora_B`` ``[out, rank]``.
    """
    pairs = {
        name.removesuffix(".lora_A"): (a, named[name.replace(".lora_A", ".lora_B")])
        for name, a in named.items()
        if name.endswith(".lora_A")
    }
    adapter = Adapter(pairs, alpha / len(next(iter(pairs.values()))[0])) if pairs else None
    soft = [named[name] for name in ("header", "trailer") if name in named]
    return Parts(adapter, torch.cat(soft) if soft else None)


def _adding(a: torch.Tensor, b: torch.Tensor, scaling: float) -> Callable[..., torch.Tensor]:
    def add(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        (x,) = args
        # cast, not computed in fp32: on a CPU the two thin products would otherwise cost as much as the layer
        return output + scaling * linear(linear(x, a.to(x.dtype)), b.to(x.dtype))

    return add


def soft_ids(count: int, first: int = 0) -> tuple[int, ...]:
    """Ids of `count` soft tokens, from row `first` on."""
    return tuple(range(SOFT + first, SOFT + first + count))


def embedded(embeddings: torch.nn.Module, ids: torch.Tensor, soft: torch.Tensor | None) -> torch.Tensor:
    """``[..., width]`` in the model's dtype: embeddings of ids, soft ones among them.

    Args:
        embeddings: the model's input embeddings, which scale their rows where the model does.

    Raises:
        IntegrityError: a soft id without its row.
    """
    marked = ids >= SOFT
    out: torch.Tensor = embeddings(ids.masked_fill(marked, 0))
    if not bool(marked.any()):
        return out
    if soft is None or int(ids.max()) >= SOFT + len(soft):
        raise IntegrityError(f"soft token {int(ids.max()) - SOFT}: its trained row is not at hand")
    return torch.where(marked[..., None], soft.to(out.dtype)[(ids - SOFT).clamp_min(0)], out)
