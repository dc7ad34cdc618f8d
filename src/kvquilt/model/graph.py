"""The two passes of training, with gradients: documents through the writer, inline rows through the frozen reader.

Both run the model's own layers under a row plan, as serving does; only the cache differs: its updates make new tensors
instead of writing slots, so that autograd sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, CacheLayerMixin

from kvquilt.model.language_model import LanguageModel
from kvquilt.model.packed import Packed, side_by_side
from kvquilt.model.parts import PLAIN, Parts, embedded
from kvquilt.model.rows import LayerReached, Pair, RowPlan, active


@dataclass(frozen=True, eq=False, slots=True)
class Read:
    """What the reader made of its rows.

    Attributes:
        logits: ``[batch, logits, vocabulary]``, the model's dtype.
        hidden: by layer, ``[batch, rows, width]``, what leaves it; of sequences side by side, those of each. Empty
            unless asked for.
    """

    logits: torch.Tensor
    hidden: list[torch.Tensor | list[torch.Tensor]]


class _GraphLayer(CacheLayerMixin):
    """One layer's keys and values, joined with those already there; the last joined pair is kept."""

    is_croppable = False

    def __init__(
        self, behind: Pair | None, index: slice | torch.Tensor | None, layout: torch.Tensor | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._behind, self._index, self._layout = behind, index, layout
        self.fresh: Pair | tuple[()] = ()
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        self.fresh = (key_states, value_states)
        if self._behind is None:
            return key_states, value_states
        keys, values = self._behind
        keys, values = _joined(keys, key_states, self._index), _joined(values, value_states, self._index)
        if self._layout is None:
            return keys, values
        return keys.index_select(2, self._layout), values.index_select(2, self._layout)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 0, 0  # plans bring their own masks

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def write(
    model: LanguageModel,
    documents: Sequence[tuple[int, ...]],
    parts: Parts,
    behind: Sequence[Pair] = (),
    *,
    keep_all: bool = False,
) -> list[Pair]:
    """The writer's pass: keys and values of every layer, with gradients to `parts`.

    Documents do not see each other. Unless `keep_all`, every layer keeps its input, keys and values only and computes
    the rest again in backward (KV gradient checkpointing, SemPIC, arXiv 2607.28069). The last layer ends at its keys
    and values. Between this pass and its backward, which belongs into the same `frozen` block, parts must not change.

    Args:
        documents: ids, soft ones among them.
        behind: by layer, keys and values ``[1, kv_heads, prefix, dim]`` that all are encoded behind.

    Returns:
        ``[1, kv_heads, rows, dim]``, the documents' rows one behind the other.
    """
    start = int(behind[0][0].shape[2]) if behind else 0
    plan = side_by_side(tuple(map(len, documents)), start, repeat=True, until=model.capability.layers - 1)
    layout = None if plan.layout is None else plan.layout.to(model.device)
    base: Any = model.hf.base_model
    out = [(torch.empty(0), torch.empty(0))] * model.capability.layers
    ids = torch.tensor([[i for document in documents for i in document]])
    hidden = embedded(model.hf.get_input_embeddings(), ids.to(model.device), parts.soft)

    def layer(index: int, forward: Callable[..., Any], entering: torch.Tensor, **kwargs: Any) -> Any:
        def closure(entering: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            # in backward this runs again, on whatever thread and with the adapter off outside: it brings its own
            cache = _GraphLayer(behind[index] if behind else None, None, layout)
            left: Any = entering
            with active(plan), parts.on(base, f"layers.{index}."), suppress(LayerReached):
                left = forward(entering, **{**kwargs, "cache": _Throwaway(cache)})
            return left[0] if isinstance(left, tuple) else left, *cache.fresh

        if keep_all:
            left, keys, values = closure(entering)
        else:  # nothing is drawn: dropout is off
            left, keys, values = checkpoint(closure, entering, use_reentrant=False, preserve_rng_state=False)
        out[index] = keys, values
        return left

    with _layers_as(base.layers, layer), active(plan):
        positions = plan.positions.to(model.device)[None]
        base(inputs_embeds=hidden, position_ids=positions, cache=_Nothing(), use_cache=True)
    return out


def read(
    model: LanguageModel,
    ids: torch.Tensor,
    plan: RowPlan,
    slots: Sequence[Pair],
    logits: int | torch.Tensor,
    *,
    parts: Parts = PLAIN,
    hidden: bool = False,
) -> Read:
    """The reader's pass over `slots`, with gradients to them.

    Args:
        ids: ``[batch, rows]`` of the plan's rows.
        slots: by layer, keys and values ``[1, kv_heads, filled, dim]``; what the plan's rows hold there is ignored. If
            shorter, the rows are those that follow.
        logits: which rows to return logits for: so many of the last, or indices.
        parts: what the reader has beside the model, with gradients to it; a frozen reader has nothing.
    """
    batch, index, base = len(ids), plan.current.index, model.hf.base_model
    tail = isinstance(index, slice) and slots[0][0].shape[2] <= index.start
    layers = [
        _GraphLayer((k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)), None if tail else index)
        for k, v in slots
    ]
    left: list[torch.Tensor] = []

    def note(module: torch.nn.Module, args: Any, output: Any) -> None:
        left.append(output[0] if isinstance(output, tuple) else output)

    watched: Any = base.layers if hidden else []
    handles = [each.register_forward_hook(note) for each in watched]
    try:
        with active(plan), parts.on(base):
            positions = plan.positions.to(model.device)[None].expand(batch, -1)
            out = model.hf(
                inputs_embeds=embedded(model.hf.get_input_embeddings(), ids.to(model.device), parts.soft),
                position_ids=positions,
                cache=Cache(layers=list(layers)),
                use_cache=True,
                logits_to_keep=logits if isinstance(logits, int) else logits.to(model.device),
            )
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(plan, Packed):
        return Read(out.logits, [*left])
    rows = [plan.rows_of(n).to(model.device) for n in range(len(plan.lengths))]
    return Read(out.logits, [[each[0, mine] for mine in rows] for each in left])


@contextmanager
def frozen(model: LanguageModel) -> Iterator[None]:
    """No gradients for the model's own weights inside the block; nobody else runs it meanwhile."""
    with model.alone():
        kept = [(p, p.requires_grad) for p in model.hf.parameters()]
        try:
            for p, _ in kept:
                p.requires_grad_(False)
            yield
        finally:
            for p, flag in kept:
                p.requires_grad_(flag)


def _joined(there: torch.Tensor, fresh: torch.Tensor, index: slice | torch.Tensor | None) -> torch.Tensor:
    if index is None:
        return torch.cat((there, fresh), 2)
    if isinstance(index, slice):
        return torch.cat((there[:, :, : index.start], fresh, there[:, :, index.stop :]), 2)
    return there.index_copy(2, index.to(there.device), fresh)


class _Nothing(Cache):
    """Stands where the model expects a cache; every layer gets one of its own."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return 0, 0


class _Throwaway(Cache):
    """The cache of one call of one layer."""

    def __init__(self, layer: _GraphLayer) -> None:
        super().__init__(layers=[layer])
        self._layer = layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        return self._layer.update(key_states, value_states)


@contextmanager
def _layers_as(layers: torch.nn.ModuleList, call: Callable[..., Any]) -> Iterator[None]:
    """Let ``call(index, layer's own forward, hidden, **kwargs)`` stand for every layer's forward."""
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for i, layer in enumerate(layers):
            layer.__dict__["forward"] = partial(call, i, layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            layer.__dict__.pop("forward", None)
            if forward is not None:
                layer.__dict__["forward"] = forward
