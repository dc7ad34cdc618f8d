"""A loaded model and its row-wise forward: the one place where kvquilt runs a transformer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvquilt.errors import NumericsError, UnsupportedModelError
from kvquilt.identity import Fingerprint, digest_fields
from kvquilt.model import attention
from kvquilt.model.capability import Capability, inspect
from kvquilt.model.counter import RowCounter
from kvquilt.model.parts import PLAIN, SOFT, Parts, embedded
from kvquilt.model.rides import Part, Ride, Rides
from kvquilt.model.rows import LayerReached, RowPlan, active
from kvquilt.model.single_row import SingleRowProducts
from kvquilt.model.slots import SlotCache, SlotPool
from kvquilt.model.together import TogetherCache
from kvquilt.model.turns import Turns
from kvquilt.model.walking import walking

PORTION_ROWS = 512  # a CPU is saturated by then, and what a layer computes of more rows can outgrow the whole cache
_PROBE_SHIFT = 37
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}  # of keys moved once
# of logits against the stock model's: 0.0 on every healthy CPU model seen, 0.09 with small biases left out
_STOCK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.04}


@dataclass(eq=False, slots=True)
class LanguageModel:
    """A frozen decoder, its tokenizer and what is known about them.

    `hf` runs under kvquilt's attention function; use `forward`, which is thread-safe (one forward at a time).
    """

    hf: PreTrainedModel
    tokenizer: Any  # a transformers fast tokenizer, whose stubs are too narrow to say so
    name: str
    capability: Capability
    fingerprint: Fingerprint
    pool: SlotPool
    products: SingleRowProducts
    threads: int
    stop_ids: frozenset[int]
    layer_weights: int  # that every row passes: all parameters of the decoder layers
    projection_share: float  # of them, in the query, key and value projections
    head_weights: int  # of the output head, passed by rows whose logits are wanted
    turns: Turns = field(default_factory=Turns, repr=False)
    rides: Rides = field(default_factory=Rides, repr=False)

    @classmethod
    def wrap(cls, hf: PreTrainedModel, tokenizer: Any, name: str, weights: str) -> LanguageModel:
        """Take over a loaded transformers model.

        Args:
            weights: digest of the weights, see `kvquilt.model.load`.

        Raises:
            UnsupportedModelError: with the reason, when its keys cannot be moved.
        """
        # weights keep requires_grad although nothing trains them: without it, torch's matmul of one sliced row copies
        # the whole output head first; no graph is recorded
        hf.eval()
        capability = inspect(hf)
        stock = _stock_logits(hf)
        attention.register()
        hf.set_attn_implementation(attention.NAME)
        pool = SlotPool(
            capability.layers, capability.kv_heads, capability.key_dim, capability.value_dim, hf.dtype, hf.device
        )
        model = cls(
            hf=hf,
            tokenizer=tokenizer,
            name=name,
            capability=capability,
            fingerprint=_fingerprint(hf, tokenizer, capability, weights),
            pool=pool,
            products=SingleRowProducts(hf),
            threads=torch.get_num_threads(),
            stop_ids=_stop_ids(hf, tokenizer),
            layer_weights=sum(p.numel() for p in _layers(hf).parameters()),
            projection_share=_projection_share(hf),
            head_weights=int(hf.get_output_embeddings().weight.numel()),
        )
        model._probe(stock)
        return model

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def vocabulary(self) -> int:
        """Ids that have an embedding: all below it."""
        return self.hf.get_input_embeddings().get_parameter("weight").shape[0]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token."""
        c = self.capability
        return c.layers * c.kv_heads * (c.key_dim + c.value_dim) * self.dtype.itemsize

    def forward(
        self,
        ids: torch.Tensor,
        plan: RowPlan,
        cache: SlotCache | TogetherCache,
        logits: int = 1,
        counter: RowCounter | None = None,
    ) -> torch.Tensor:
        """Compute the plan's rows: write their keys and values into `cache`, attend by slot, return logits.

        Args:
            ids: ``[batch, rows]`` int64 token ids of the plan's rows, in the plan's order; soft ones need the cache's
                `parts`.
            cache: its `filled` is set to the plan's afterwards. Its `parts` are on for this forward.
            logits: how many of the last rows to return logits for; 0 skips the output head.

        Returns:
            fp32 logits ``[batch, logits, vocabulary]``.

        Raises:
            NumericsError: a row's logits hold NaN or are infinite.
        """
        positions = plan.positions.to(self.device)[None]
        one_row = ids.numel() == 1 and self.dtype == torch.bfloat16 and self.device.type == "cpu"
        products = self.products.installed() if one_row else nullcontext()
        by_layer = walking(_layers(self.hf), plan) if plan.walks else nullcontext()
        parts = cache.parts
        on = parts.on(self.hf.base_model)
        with (
            self.turns.taken(),
            torch.inference_mode(),
            active(plan),
            products,
            on,
            by_layer,
            _counting(self.hf, counter),
        ):
            inputs: dict[str, Any] = {
                "position_ids": positions.expand(ids.shape[0], -1),
                "cache": cache,
                "use_cache": True,
            }
            if bool((ids >= SOFT).any()):
                inputs["inputs_embeds"] = embedded(self.hf.get_input_embeddings(), ids.to(self.device), parts.soft)
            else:
                inputs["input_ids"] = ids.to(self.device)
            out: torch.Tensor
            if logits == 0:
                with suppress(LayerReached):
                    self.hf.base_model(**inputs)
                if self.device.type == "cuda" and self.turns.streams:
                    torch.cuda.synchronize(self.device)  # else the next step waits for what nobody measured
                out = torch.empty(ids.shape[0], 0, 0)
            else:
                out = self.hf(**inputs, logits_to_keep=logits).logits.float()
        cache.filled, cache.view = plan.filled, plan.view
        if counter is not None:
            counter.pairs += plan.pairs * ids.shape[0]
            counter.besides += 0.0 if parts.cross is None else parts.cross.flops(ids.numel())
        if logits and not torch.isfinite(out.amax(-1)).all():
            raise NumericsError(f"{self.name} produced NaN or infinite logits; try dtype float32")
        return out

    def portions(
        self, ids: torch.Tensor, plan: RowPlan, cache: SlotCache, logits: int = 1, counter: RowCounter | None = None
    ) -> torch.Tensor:
        """`forward`, of many rows a portion at a time.

        That bounds memory, and how long those who stream wait for their next token: where it can, a portion goes
        along with their steps. Full prefill goes in one where nobody streams, and a plan that somebody watches always
        does.
        """
        if plan.watcher is not None or not (self.turns.streams or not plan.current.is_prefill):
            return self.forward(ids, plan, cache, logits, counter)
        ends_there = plan.until in (None, self.capability.layers - 1)  # a ride goes through all layers
        may_ride = len(ids) == 1 and ends_there and not plan.walks and not self.turns.mine
        total, first = len(plan.rows), 0
        # one at least does not ride: the last forward needs rows
        ride = Ride(Part(ids[0], plan, cache, counter or RowCounter()), total - max(logits, 1), self.turns.unwanted)
        while total - first > max(most := self.at_once(len(ids)), logits):
            beside = self.turns.streams
            if may_ride and beside and not ride.refused:
                ride.gone = first
                self.rides.along(ride, patience=max(4 * self.turns.pace.step, 0.01))
                if ride.gone > first:
                    first = ride.gone
                    continue
            last = min(first + most, total - logits)
            self.forward(ids[:, first:last], plan.part(first, last), cache, 0, counter)
            if beside:
                self.turns.pace.portion_took(len(ids) * (last - first), self.turns.held)
            first = last
        if not first:
            return self.forward(ids, plan, cache, logits, counter)
        return self.forward(ids[:, first:], plan.part(first, total), cache, logits, counter)

    def at_once(self, batch: int = 1) -> int:
        """Rows of each of `batch` sequences that a portion has."""
        return max(1, (self.turns.pace.portion if self.turns.streams else PORTION_ROWS) // batch)

    def alone(self) -> AbstractContextManager[object]:
        """Nobody else runs the model inside the block."""
        return self.turns.taken()

    def encode(
        self,
        ids: torch.Tensor,
        behind: SlotCache | None = None,
        counter: RowCounter | None = None,
        parts: Parts = PLAIN,
    ) -> SlotCache:
        """Compile pass: run ``[batch, tokens]`` ids alone, or behind the filled slots of `behind` (batch of one).

        Returns a cache from the pool, to be released by the caller. Right-padded rows are harmless: under a causal
        mask no real row sees them.
        """
        batch, tokens = ids.shape
        start = behind.filled if behind is not None else 0
        cache = self.pool.acquire(start + tokens, batch)
        cache.parts = parts
        try:
            if behind is not None:
                cache.slot_keys[:, :, :, :start] = behind.slot_keys[:, :, :, :start]
                cache.slot_values[:, :, :, :start] = behind.slot_values[:, :, :, :start]
            plan = RowPlan(torch.arange(start, start + tokens), start + tokens, until=self.capability.layers - 1)
            compute = self.portions if self.turns.streams else self.forward
            compute(ids, plan, cache, 0, counter)
        except BaseException:
            self.pool.release(cache)
            raise
        return cache

    def _probe(self, stock: torch.Tensor) -> None:
        """Refuse a model whose attention is more than slots and masks, or whose keys do not move as its table says.

        Catches what no configuration field tells: masks and biases that the model adds by itself, interleaved
        layouts, absolute positions, exceptions of single layers. `stock` are the logits of the untouched model.
        """
        ids = _probe_ids(self.hf)
        count = ids.shape[1]
        with self.pool.lend(count) as here, self.pool.lend(count) as there:
            self.forward(ids, RowPlan(torch.arange(count), count), here, 0)
            self.forward(ids, RowPlan(torch.arange(count), count, offset=_PROBE_SHIFT), there, 0)
            for layer, table in enumerate(self.capability.tables):
                fresh, moved = there.slot_keys[layer, :, :, :count], here.slot_keys[layer, :, :, :count].clone()
                if table is not None:
                    table.rotate(here.slot_keys[layer, :, :, :count], _PROBE_SHIFT, moved)
                self._expect(
                    moved,
                    fresh,
                    f"keys of layer {layer} do not move by their rotary table",
                    _PROBE_TOLERANCE[self.dtype],
                )
            plan = RowPlan(torch.arange(1, count), count)
            masked = self.forward(ids[:, 1:], plan, here, count - 1)
        self._expect(
            masked,
            stock[:, 1:],
            "its attention is not plain causal attention, and would be left out",
            _STOCK_TOLERANCE[self.dtype],
        )
        self._expect_windows(plan.windows)

    def _expect_windows(self, given: list[int | None]) -> None:
        """Refuse a window that is in the mask alone (Qwen2-MoE, PhiMoE): a plan brings masks of its own."""
        calls, rest = divmod(len(given), self.capability.layers)  # some attend more than once in a layer
        if rest or not calls:
            raise UnsupportedModelError(f"{self.name}: some of its layers attend by themselves, past every mask")
        for layer, window in enumerate(self.capability.windows):
            seen = given[layer * calls]
            if seen != window and min(w for w in (seen, window) if w is not None) < self.capability.max_length:
                raise UnsupportedModelError(
                    f"{self.name}: the configuration gives layer {layer} a window of {window}, "
                    f"its attention is called with {seen}; masks of the model's own are not implemented here"
                )

    def _expect(self, measured: torch.Tensor, truth: torch.Tensor, otherwise: str, tolerance: float) -> None:
        error = float((measured.float() - truth.float()).norm() / truth.float().norm().clamp_min(1e-6))
        if not error <= tolerance:
            raise UnsupportedModelError(f"{self.name}: {otherwise} (relative error {error:.2g})")


def _probe_ids(hf: PreTrainedModel) -> torch.Tensor:
    vocabulary = int(hf.config.get_text_config().vocab_size)
    return torch.arange(1, 9)[None] * 7 % vocabulary


@torch.inference_mode()
def _stock_logits(hf: PreTrainedModel) -> torch.Tensor:
    """``[1, 8, vocabulary]`` of the model's own forward under its own attention."""
    return cast(torch.Tensor, hf(input_ids=_probe_ids(hf).to(hf.device), use_cache=False).logits)


def _layers(hf: PreTrainedModel) -> torch.nn.ModuleList:
    layers: torch.nn.ModuleList = hf.base_model.layers  # type: ignore[assignment]  # `inspect` has seen them
    return layers


@contextmanager
def _counting(hf: PreTrainedModel, counter: RowCounter | None) -> Iterator[None]:
    """Count rows entering every decoder layer of this forward."""
    if counter is None:
        yield
        return

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        rows = hidden.shape[0] * hidden.shape[1]
        counter.token_layers += rows
        counter.unfinished += rows
        if module is layers[0]:
            counter.rows += rows

    def leave(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        counter.unfinished -= hidden.shape[0] * hidden.shape[1]

    layers = _layers(hf)
    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(leave, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _projection_share(hf: PreTrainedModel) -> float:
    """Weights of the query, key and value projections over all weights of the decoder layers."""
    layers = _layers(hf)
    named = [(name, p.numel()) for layer in layers for name, p in layer.named_parameters() if "self_attn." in name]
    inside = sum(n for name, n in named if "o_proj" not in name and "dense" not in name.split("self_attn.")[1])
    return inside / sum(p.numel() for p in layers.parameters())


def _fingerprint(hf: PreTrainedModel, tokenizer: Any, capability: Capability, weights: str) -> Fingerprint:
    tables = [
        (f"layer {i}", t.inv_freq.cpu().numpy().tobytes() if t else None) for i, t in enumerate(capability.tables)
    ]
    scaling = [
        (name, repr(float(getattr(hf.base_model.rotary_emb, name))))
        for name in sorted(vars(hf.base_model.rotary_emb))
        if name.endswith("attention_scaling")
    ]
    windows: list[tuple[str, bytes | str | None]] = [
        (f"window {i}", None if w is None else str(w)) for i, w in enumerate(capability.windows)
    ]
    serial = tokenizer.backend_tokenizer.to_str()
    return Fingerprint(
        weights=weights,
        tokenizer=digest_fields("kvquilt 2026-11 tokenizer v1", [("tokenizer", serial)]),
        rope=digest_fields("kvquilt 2026-11 rope v1", tables + scaling + windows),
        dtype=str(hf.dtype).removeprefix("torch."),
    )


def _stop_ids(hf: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """End-of-answer ids: the generation configuration's, else the tokenizer's."""
    configured = hf.generation_config.eos_token_id if hf.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
