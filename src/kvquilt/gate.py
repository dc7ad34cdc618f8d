"""The quality gate: does reuse keep what full prefill would say, on this model and these documents?

First come the endpoint checks (`kvquilt.endpoints`), which a healthy model passes whatever the documents. Then
fidelity is measured: KL divergence per token to full prefill, over full prefill's own answers, teacher-forced, to
questions that the model itself asks about the documents.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvquilt.answer import step
from kvquilt.endpoints import Check, check_endpoints
from kvquilt.gate_samples import builtin_documents, fit_documents, sample_prompts
from kvquilt.identity import namespace
from kvquilt.ledger import Ledger, Provenance
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Document
from kvquilt.repair.presets import AUTO_ORDER, METHODS, find_method
from kvquilt.retrieval import ranked_documents
from kvquilt.store import Failure

if TYPE_CHECKING:
    from kvquilt.engine import Engine

log = logging.getLogger(__name__)
_ANSWER_TOKENS = 16
_QUESTION_TOKENS = 24
LEAST_PROMPTS = 3
_ASK = "Write one short question about a fact that the document states."


@dataclass(frozen=True, slots=True)
class Verdict:
    """Fidelity of one method to full prefill.

    Attributes:
        mean_kl, p95_kl: nats per answer token, KL(full || method).
        top1: share of answer tokens whose most likely token is the same.
        prompts, tokens: how much this was measured on.
        reused: document tokens that were reused without being exact; without any, nothing was measured.
        passed, reason: under the limits of the report, see `shortfall`.
    """

    method: str
    passed: bool
    mean_kl: float
    p95_kl: float
    top1: float
    prompts: int
    tokens: int
    reused: int
    reason: str

    @property
    def summary(self) -> str:
        """The figures in one line."""
        return f"mean KL {self.mean_kl:.3f}, top-1 {self.top1:.2f} on {self.prompts} sample prompts"

    def shortfall(self, max_kl: float, min_top1: float) -> str:
        """Why the method does not pass under these limits, or ""."""
        if self.prompts < LEAST_PROMPTS:
            return f"measured on {self.prompts} prompts, {LEAST_PROMPTS} are needed"
        if not self.reused:
            return "no token was reused in the sample prompts"
        faults = []
        if not self.mean_kl <= max_kl:
            faults.append(f"mean KL {self.mean_kl:.3f} is above {max_kl:g}")
        if not self.top1 >= min_top1:
            faults.append(f"top-1 agreement {self.top1:.2f} is below {min_top1:g}")
        return "; ".join(faults)


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
        """The report of `as_dict`. Raises TypeError or KeyError for one of another version."""

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

    At least `LEAST_PROMPTS` are measured, however short the time: a verdict on less would be chance. The report is
    stored for `tenant`.
    """
    began = time.perf_counter()
    documents = fit_documents(engine, documents)
    checks = tuple(check_endpoints(engine, documents))
    seen = {name: _Seen() for name in AUTO_ORDER}
    samples = []
    if all(c.passed for c in checks):
        count = min(prompts, max(len(documents), LEAST_PROMPTS))
        samples = sample_prompts(documents, fit_documents(engine, builtin_documents()), count)
    for done, (chosen, target) in enumerate(samples):
        if done >= LEAST_PROMPTS and time.perf_counter() - began > seconds:
            break
        _measure(engine, chosen, target, tenant, seen)
        if progress is not None:
            progress(done + 1, len(samples))
    limits = engine.settings.gate_max_kl, engine.settings.gate_min_top1
    report = DoctorReport(
        model=engine.model.name,
        fingerprint=engine.model.fingerprint.digest,
        writer=engine.writer.digest,
        checks=checks,
        verdicts=tuple(_verdict(name, found, *limits) for name, found in seen.items()),
        max_kl=limits[0],
        min_top1=limits[1],
        seconds=time.perf_counter() - began,
    )
    outcome = engine.store.write_note(namespace(tenant), note_name(engine), report.as_dict())
    if isinstance(outcome, Failure):
        log.warning("the gate's verdict could not be stored (%s) and holds for this process only", outcome.reason)
    return report


def note_name(engine: Engine) -> str:
    """Name of the stored report: another model, table, dtype or writer is another verdict."""
    return f"gate2-{engine.model.fingerprint.digest[:40]}-{engine.writer.digest[:24]}"


@dataclass(slots=True)
class _Seen:
    """Measurements of one method: one tensor ``[answer]`` per prompt, and tokens reused."""

    kls: list[torch.Tensor] = field(default_factory=list)
    agree: list[torch.Tensor] = field(default_factory=list)
    reused: int = 0


def _measure(
    engine: Engine, documents: list[Document], target: int, tenant: str | None, seen: dict[str, _Seen]
) -> None:
    """Full prefill answers a question about the target; its answer is then forced through every method."""
    question = _question(engine, documents[target], tenant)
    # the document that was asked about, then the others as BM25 has them
    ranking = [target, *(n for n in ranked_documents(question, documents) if n != target)]
    runs = engine.prompt(question, documents).runs(engine.model.tokenizer)
    # a method that reorders is held against the truth in the given order, which is what the user would have had
    answer, truth = _truth(engine, place_runs(runs), tenant, _ANSWER_TOKENS)
    for name, found in seen.items():
        method, ledger = find_method(name), Ledger()
        # the last rows of a prompt with all answer tokens but the last behind it predict the answer
        forced = place_runs(runs, method.order, ranking, method.moved).followed_by(answer[:-1])
        logits, cache = engine.reader.read(forced, method, tenant, ledger, 0, len(answer))
        engine.model.pool.release(cache)
        measured = logits.log_softmax(-1)
        found.kls.append((truth.exp() * (truth - measured)).sum(-1).clamp_min(0.0))
        found.agree.append((truth.argmax(-1) == measured.argmax(-1)).float())
        found.reused += sum(ledger.tokens[p] for p in (Provenance.REUSED, Provenance.CORRECTED, Provenance.ABSENT))


def _question(engine: Engine, document: Document, tenant: str | None) -> str:
    """A question that the model asks about the document; a fixed one where it asks none.

    Real questions matter: asked to repeat a text, a model copies, which pure reuse hardly harms.
    """
    placement = place_runs(engine.prompt(_ASK, [document]).runs(engine.model.tokenizer))
    ids, _ = _truth(engine, placement, tenant, _QUESTION_TOKENS)
    text: str = engine.model.tokenizer.decode(ids, skip_special_tokens=True)
    made, mark, _ = text.strip().partition("?")
    if mark and "\n" not in made:
        return made + mark
    return f"What does the text that begins with “{' '.join(document.text.split()[:12])}” say?"


def _truth(
    engine: Engine, placement: Placement, tenant: str | None, tokens: int
) -> tuple[tuple[int, ...], torch.Tensor]:
    """Full prefill's greedy answer, end token included, and log-probabilities ``[answer, vocabulary]`` at each step.

    Not through a stream, which would end the user's own live conversation.
    """
    model = engine.model
    logits, cache = engine.reader.read(placement, METHODS["full"], tenant, Ledger(), tokens)
    steps, ids = [logits[-1]], [int(logits[-1].argmax())]
    try:
        while len(ids) < tokens and ids[-1] not in model.stop_ids:
            steps.append(step(model, cache, ids[-1]))
            ids.append(int(steps[-1].argmax()))
    finally:
        model.pool.release(cache)
    return tuple(ids), torch.stack(steps).log_softmax(-1)


def _verdict(name: str, found: _Seen, max_kl: float, min_top1: float) -> Verdict:
    if not found.kls:
        nothing = float("nan")
        return Verdict(name, False, nothing, nothing, nothing, 0, 0, 0, "not measured: an endpoint check failed")
    kl, top1 = torch.cat(found.kls), float(torch.cat(found.agree).mean())
    measured = Verdict(
        name, False, float(kl.mean()), float(kl.quantile(0.95)), top1, len(found.kls), kl.numel(), found.reused, ""
    )
    reason = measured.shortfall(max_kl, min_top1)
    return replace(measured, passed=not reason, reason=reason)
