"""The quality gate: does reuse keep what full prefill would say, on this model and these documents?

Two questions, asked in order. The endpoint checks are theorems that a healthy model must obey (all rows computed is
full prefill, one document first is exact, shifting everything changes nothing), so a failure means that placement is
wrong for this model. Fidelity is a measurement: KL divergence per token to full prefill over teacher-forced answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvquilt.decode import Sampling
from kvquilt.identity import namespace
from kvquilt.ledger import Ledger
from kvquilt.model.attention import RowPlan
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Document, Run
from kvquilt.repair.operator import repair
from kvquilt.repair.presets import AUTO_ORDER, METHODS
from kvquilt.segment import place
from kvquilt.writers.isolated import Isolated

if TYPE_CHECKING:
    from kvquilt.engine import Engine

_ANSWER_TOKENS = 16
_DOCUMENTS = 4
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Fidelity of one method to full prefill.

    Attributes:
        mean_kl, p95_kl: nats per answer token, KL(full || method).
        top1: share of answer tokens whose most likely token is the same.
        prompts, tokens: how much this was measured on.
        reason: why it failed, or "".
    """

    method: str
    passed: bool
    mean_kl: float
    p95_kl: float
    top1: float
    prompts: int
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What `doctor` found; stored under the fingerprint and read back by the engine."""

    model: str
    fingerprint: str
    writer: str
    checks: tuple[Check, ...]
    verdicts: tuple[Verdict, ...]
    max_kl: float
    min_top1: float
    seconds: float

    @property
    def healthy(self) -> bool:
        """Every endpoint check passed."""
        return all(c.passed for c in self.checks)

    def verdict(self, method: str) -> Verdict | None:
        return next((v for v in self.verdicts if v.method == method), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON, which has no NaN: a figure that does not exist is None."""
        plain = asdict(self)
        for row in (*plain["checks"], *plain["verdicts"]):
            row.update({k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)})
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DoctorReport:
        def rows(name: str) -> list[dict[str, Any]]:
            return [{k: math.nan if v is None else v for k, v in row.items()} for row in data[name]]

        made = {
            "checks": tuple(Check(**row) for row in rows("checks")),
            "verdicts": tuple(Verdict(**row) for row in rows("verdicts")),
        }
        return cls(**{**data, **made})


def examine(
    engine: Engine,
    documents: Sequence[Document],
    tenant: str | None,
    seconds: float,
    prompts: int,
    progress: Callable[[int, int], None] | None = None,
) -> DoctorReport:
    """Run the checks, then measure every reusing method on sample prompts until `prompts` or `seconds` are used up.

    At least one prompt is measured, however short the time. The report is stored for `tenant`.
    """
    began = time.perf_counter()
    checks = tuple(_checks(engine, documents))
    kls: dict[str, list[torch.Tensor]] = {name: [] for name in AUTO_ORDER}
    agree: dict[str, list[torch.Tensor]] = {name: [] for name in AUTO_ORDER}
    done = 0
    samples = _samples(documents, prompts) if all(c.passed for c in checks) else []
    for question, chosen, target in samples:
        if done and time.perf_counter() - began > seconds:
            break
        _measure(engine, question, chosen, target, tenant, kls, agree)
        done += 1
        if progress is not None:
            progress(done, len(samples))
    limits = engine.settings.gate_max_kl, engine.settings.gate_min_top1
    verdicts = tuple(_verdict(name, kls[name], agree[name], done, *limits) for name in AUTO_ORDER)
    report = DoctorReport(
        model=engine.model.name,
        fingerprint=engine.model.fingerprint.digest,
        writer=engine.writer.digest,
        checks=checks,
        verdicts=verdicts,
        max_kl=limits[0],
        min_top1=limits[1],
        seconds=time.perf_counter() - began,
    )
    engine.store.write_note(namespace(tenant), note_name(engine), report.as_dict())
    return report


def note_name(engine: Engine) -> str:
    """Name of the stored report: another model, table, dtype or writer is another verdict."""
    return f"gate-{engine.model.fingerprint.digest[:40]}-{engine.writer.digest[:24]}"


def _measure(
    engine: Engine,
    question: str,
    documents: list[Document],
    target: int,
    tenant: str | None,
    kls: dict[str, list[torch.Tensor]],
    agree: dict[str, list[torch.Tensor]],
) -> None:
    """Full prefill answers greedily; its answer is then forced through every method."""
    runs = engine.prompt(question, documents).runs(engine.model.tokenizer)
    answer = _greedy(engine, place_runs(runs), tenant)
    for name in AUTO_ORDER:
        method = METHODS[name]
        forced = _forced(place_runs(runs, method.order, target), answer)
        # order changes what full prefill says too; the method is held against the truth in the given order
        truth = _logits(engine, _forced(place_runs(runs), answer), "full", None, tenant, len(answer))
        spot = forced.documents()[-1] if method.order == "target_last" else None
        out = _logits(engine, forced, name, spot, tenant, len(answer))
        reference, measured = truth.log_softmax(-1), out.log_softmax(-1)
        kls[name].append((reference.exp() * (reference - measured)).sum(-1).clamp_min(0.0))
        agree[name].append((truth.argmax(-1) == out.argmax(-1)).float())


def _forced(placement: Placement, answer: tuple[int, ...]) -> Placement:
    """The prompt with all answer tokens but the last behind it: its last rows predict the answer."""
    return place_runs([*placement.runs, Run(answer[:-1])]) if len(answer) > 1 else placement


def _logits(
    engine: Engine, placement: Placement, method: str, target: int | None, tenant: str | None, rows: int
) -> torch.Tensor:
    logits, cache = engine.reader.read(placement, METHODS[method], target, tenant, Ledger(), 0, rows)
    engine.model.pool.release(cache)
    return logits


def _greedy(engine: Engine, placement: Placement, tenant: str | None) -> tuple[int, ...]:
    """Full prefill's own answer, at least one token."""
    stream = engine.run(placement, METHODS["full"], None, tenant, Sampling(max_new_tokens=_ANSWER_TOKENS), Ledger())
    ids = stream.result().token_ids
    return ids or (min(engine.model.stop_ids),)


def _samples(documents: Sequence[Document], prompts: int) -> list[tuple[str, list[Document], int]]:
    """Question, documents and the target's index: every document asked about in turn, at every position in turn."""
    made = []
    step = max(1, len(documents) // max(1, prompts))
    for n in range(min(prompts, len(documents))):
        at = n * step % len(documents)
        others = [documents[(at + k * step + k) % len(documents)] for k in range(1, _DOCUMENTS)]
        chosen = list(dict.fromkeys(d for d in others if d is not documents[at]))
        target = n % (len(chosen) + 1)
        chosen.insert(target, documents[at])
        opening = " ".join(documents[at].text.split()[:12])
        made.append((f"What does the text that begins with “{opening}” say?", chosen, target))
    return made


def _verdict(
    name: str, kls: list[torch.Tensor], agree: list[torch.Tensor], prompts: int, max_kl: float, min_top1: float
) -> Verdict:
    if not kls:
        return Verdict(name, False, float("nan"), float("nan"), float("nan"), 0, 0, "an endpoint check failed")
    kl, top1 = torch.cat(kls), float(torch.cat(agree).mean())
    mean, p95 = float(kl.mean()), float(kl.quantile(0.95))
    faults = []
    if not mean <= max_kl:
        faults.append(f"mean KL {mean:.3f} is above {max_kl:g}")
    if not top1 >= min_top1:
        faults.append(f"top-1 agreement {top1:.2f} is below {min_top1:g}")
    return Verdict(name, not faults, mean, p95, top1, prompts, kl.numel(), "; ".join(faults))


def _checks(engine: Engine, documents: Sequence[Document]) -> list[Check]:
    """Endpoint tests on the real model with the user's own tokens."""
    model = engine.model
    limit = _ENDPOINT_KL[model.dtype]
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
        shifted = model.forward(torch.tensor([ids]), RowPlan(torch.arange(n), n, offset=64), two, width)[0]
        checks.append(("everything shifted by 64 positions", kl(shifted), limit))
        checks.extend(_segment_checks(engine, placement, one, two, kl, limit, width))
    finally:
        for cache in caches:
            model.pool.release(cache)
    return [Check(name, value <= top, value, top) for name, value, top in checks]


def _segment_checks(
    engine: Engine,
    placement: Placement,
    one: Any,
    two: Any,
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
