"""Endpoint checks: theorems that a healthy model must obey, tried on the real model with the user's own tokens.

All rows computed is full prefill, one document first is exact, shifting everything changes nothing, layer 0 of a moved
document is exact. A failure means that placement is wrong for this model, whatever fidelity would say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvquilt.model.intact import additions
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Document
from kvquilt.repair.operator import repair
from kvquilt.segment import place
from kvquilt.writers.isolated import Isolated

if TYPE_CHECKING:
    from kvquilt.engine import Engine

# Rounding alone moves bf16 distributions: one replication saw a mean KL of 6e-4 and a maximum of 4e-3 per first token.
# A wrong rotation costs whole nats, so the margin between is wide.
_ENDPOINT_KL = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_LAYER0_ERROR = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Check:
    """One endpoint test: `value` must not exceed `limit` (KL in nats, or a relative error)."""

    name: str
    passed: bool
    value: float
    limit: float


def limit_of(model: LanguageModel) -> float:
    """Mean KL in nats up to which two ways of computing the same rows are the same in the model's dtype."""
    return _ENDPOINT_KL[model.dtype]


def check_endpoints(engine: Engine, documents: Sequence[Document]) -> list[Check]:
    """Run every check on a prompt of the first two documents."""
    model = engine.model
    limit = limit_of(model)
    runs = engine.prompt("What is this about?", list(documents[:2])).runs(model.tokenizer)
    placement = place_runs(runs)
    ids, n = placement.ids, placement.tokens
    width = min(8, len(runs[-1].ids))

    def kl(logits: torch.Tensor) -> float:
        return float((full.exp() * (full - logits.log_softmax(-1))).sum(-1).mean().clamp_min(0.0))

    caches = [model.pool.acquire(n) for _ in range(2)]
    try:
        one, two = caches
        full = repair(model, one, ids, [range(n)], width).log_softmax(-1)
        checks = []
        # the same rows in two passes: the second overwrites what the first wrote, through the masked path
        out = repair(model, one, ids, [range(1, n)], width)
        checks.append(("all rows equal full prefill", kl(out), limit))
        half = n // 2
        repair(model, two, ids[:half], [range(half)], 0)
        out = repair(model, two, ids, [range(half, n)], width)
        checks.append(("self-transfer: prefill in two parts", kl(out), limit))
        shift = max(0, min(64, model.capability.max_length - n))  # within the length at which the table is constant
        shifted = model.forward(torch.tensor([ids]), RowPlan(torch.arange(n), n, offset=shift), two, width)[0]
        checks.append((f"everything shifted by {shift} positions", kl(shifted), limit))
        checks.extend(_segment_checks(engine, placement, one, two, kl, limit, width))
    finally:
        for cache in caches:
            model.pool.release(cache)
    checks.append(("hooks left on the reader, such as an adapter's", float(len(additions(model))), 0.0))
    return [Check(name, value <= top, value, top) for name, value, top in checks]


def _segment_checks(
    engine: Engine,
    placement: Placement,
    one: SlotCache,
    two: SlotCache,
    kl: Callable[[torch.Tensor], float],
    limit: float,
    width: int,
) -> list[tuple[str, float, float]]:
    """A leading segment is exact; a moved one has exact layer-0 keys and values. `one` holds the full prefill."""
    model, ids, n = engine.model, placement.ids, placement.tokens
    tables = model.capability.tables
    at = placement.documents()[-1]
    head, span = placement.starts[at], placement.span(at)
    [(_, leading)] = Isolated().compile(model, [ids[: span.stop]])
    repair(model, one, ids, [range(n)], 0)
    place(leading, 0, tables, two.slot_keys[:, 0, :, : span.stop])
    two.slot_values[:, 0, :, : span.stop].copy_(leading.values)
    exact = kl(repair(model, two, ids, [range(span.stop, n)], width))
    [(_, moved)] = Isolated().compile(model, [ids[head : span.stop]])
    place(moved, head, tables, two.slot_keys[:, 0, :, head : span.stop])
    error = max(
        _relative(two.slot_keys[0, 0, :, head : span.stop], one.slot_keys[0, 0, :, head : span.stop]),
        _relative(moved.values[0], one.slot_values[0, 0, :, head : span.stop]),
    )
    return [
        ("one document first equals full prefill", exact, limit),
        ("layer-0 keys and values of a moved document", error, _LAYER0_ERROR[model.dtype]),
    ]


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-9))
