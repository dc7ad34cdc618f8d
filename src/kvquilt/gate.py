"""The quality gate: does reuse keep what full prefill would say, on this model and these documents?

First come the endpoint checks (`kvquilt.endpoints`), which a healthy model passes whatever the documents. Then
fidelity is measured: KL divergence per token to full prefill, over full prefill's own answers, teacher-forced, to
questions that the model itself asks about the documents.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvquilt.answer import Answer, step
from kvquilt.decode import Sampling
from kvquilt.endpoints import Check, check_endpoints
from kvquilt.identity import namespace
from kvquilt.ledger import Ledger
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Document, Run
from kvquilt.repair.presets import AUTO_ORDER, METHODS

if TYPE_CHECKING:
    from kvquilt.engine import Engine

_ANSWER_TOKENS = 16
_QUESTION_TOKENS = 24
_LEAST = 3
_DOCUMENTS = 4
_ASK = "Write one short question about a fact that the document states."


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

    At least `_LEAST` prompts are measured, however short the time: a verdict on less would be chance. The report is
    stored for `tenant`.
    """
    began = time.perf_counter()
    checks = tuple(check_endpoints(engine, documents))
    kls: dict[str, list[torch.Tensor]] = {name: [] for name in AUTO_ORDER}
    agree: dict[str, list[torch.Tensor]] = {name: [] for name in AUTO_ORDER}
    done = 0
    samples = _samples(documents, prompts) if all(c.passed for c in checks) else []
    for chosen, target in samples:
        if done >= _LEAST and time.perf_counter() - began > seconds:
            break
        _measure(engine, chosen, target, tenant, kls, agree)
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
    documents: list[Document],
    target: int,
    tenant: str | None,
    kls: dict[str, list[torch.Tensor]],
    agree: dict[str, list[torch.Tensor]],
) -> None:
    """Full prefill answers a question about the target; its answer is then forced through every method."""
    question = _question(engine, documents[target], tenant)
    runs = engine.prompt(question, documents).runs(engine.model.tokenizer)
    given = place_runs(runs)
    # a method that reorders is held against the truth in the given order, which is what the user would have had
    answer, truth = _truth(engine, given, tenant)
    for name in AUTO_ORDER:
        method = METHODS[name]
        forced = _forced(place_runs(runs, method.order, target), answer)
        spot = forced.documents()[-1] if method.order == "target_last" else None
        measured = _logits(engine, forced, name, spot, tenant, len(answer)).log_softmax(-1)
        kls[name].append((truth.exp() * (truth - measured)).sum(-1).clamp_min(0.0))
        agree[name].append((truth.argmax(-1) == measured.argmax(-1)).float())


def _question(engine: Engine, document: Document, tenant: str | None) -> str:
    """A question that the model asks about the document; a fixed one where it asks none.

    Real questions matter: asked to repeat a text, a model copies, which pure reuse hardly harms.
    """
    placement = place_runs(engine.prompt(_ASK, [document]).runs(engine.model.tokenizer))
    made, mark, _ = _full(engine, placement, tenant, _QUESTION_TOKENS).text.strip().partition("?")
    if mark and "\n" not in made:
        return made + mark
    return f"What does the text that begins with “{' '.join(document.text.split()[:12])}” say?"


def _forced(placement: Placement, answer: tuple[int, ...]) -> Placement:
    """The prompt with all answer tokens but the last behind it: its last rows predict the answer."""
    return place_runs([*placement.runs, Run(answer[:-1])]) if len(answer) > 1 else placement


def _logits(
    engine: Engine, placement: Placement, method: str, target: int | None, tenant: str | None, rows: int
) -> torch.Tensor:
    logits, cache = engine.reader.read(placement, METHODS[method], target, tenant, Ledger(), 0, rows)
    engine.model.pool.release(cache)
    return logits


def _full(engine: Engine, placement: Placement, tenant: str | None, tokens: int) -> Answer:
    """Full prefill's own greedy answer."""
    return engine.run(placement, METHODS["full"], None, tenant, Sampling(max_new_tokens=tokens), Ledger()).result()


def _truth(engine: Engine, placement: Placement, tenant: str | None) -> tuple[tuple[int, ...], torch.Tensor]:
    """Full prefill's greedy answer, end token included, and log-probabilities ``[answer, vocabulary]`` at each step."""
    model = engine.model
    logits, cache = engine.reader.read(placement, METHODS["full"], None, tenant, Ledger(), _ANSWER_TOKENS)
    steps, ids = [logits[-1]], [int(logits[-1].argmax())]
    try:
        while len(ids) < _ANSWER_TOKENS and ids[-1] not in model.stop_ids:
            steps.append(step(model, cache, ids[-1]))
            ids.append(int(steps[-1].argmax()))
    finally:
        model.pool.release(cache)
    return tuple(ids), torch.stack(steps).log_softmax(-1)


def _samples(documents: Sequence[Document], prompts: int) -> list[tuple[list[Document], int]]:
    """Documents and the target's index: every document asked about in turn, at every position in turn."""
    made = []
    step = max(1, len(documents) // max(1, prompts))
    for n in range(min(prompts, len(documents))):
        at = n * step % len(documents)
        others = [documents[(at + k * step + k) % len(documents)] for k in range(1, _DOCUMENTS)]
        chosen = list(dict.fromkeys(d for d in others if d is not documents[at]))
        target = n % (len(chosen) + 1)
        chosen.insert(target, documents[at])
        made.append((chosen, target))
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
