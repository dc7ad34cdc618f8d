"""The quality gate: does reuse keep what full prefill would say, on this model and these documents?

First come the endpoint checks (`kvquilt.endpoints`), which a healthy model passes whatever the documents. Then
fidelity is measured: KL divergence per token to full prefill, over full prefill's own answers, teacher-forced, to
questions that the model itself asks about the documents. A method sees the question alone when it chooses its rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvquilt.endpoints import check_endpoints
from kvquilt.errors import InputError
from kvquilt.fidelity import compare, truth
from kvquilt.gate_report import LEAST_PROMPTS, DoctorReport, Verdict
from kvquilt.gate_samples import builtin_documents, fit_documents, make_question, sample_prompts
from kvquilt.identity import namespace
from kvquilt.ledger import Provenance
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Document, Run, check_documents
from kvquilt.repair.presets import Method, find_method
from kvquilt.repair.selector import Probe
from kvquilt.retrieval import ranked_documents
from kvquilt.store import Failure

if TYPE_CHECKING:
    from kvquilt.engine import Engine

log = logging.getLogger(__name__)
_ANSWER_TOKENS = 16
_APART = (Provenance.REUSED, Provenance.CORRECTED, Provenance.ABSENT)


@dataclass(slots=True)
class _Seen:
    """Measurements of one method: one tensor ``[answer]`` per prompt, and tokens reused.

    Attributes:
        helper, trained: see `Verdict`.
        charged: share of what reuse saves, per prompt.
        refused: why the method cannot run on these prompts, if it cannot.
    """

    method: Method
    helper: str
    trained: str
    kls: list[torch.Tensor] = field(default_factory=list)
    agree: list[torch.Tensor] = field(default_factory=list)
    reused: int = 0
    charged: list[float] = field(default_factory=list)
    refused: str = ""


def examine(
    engine: Engine,
    documents: Sequence[Document] | None,
    tenant: str | None,
    seconds: float,
    prompts: int,
    progress: Callable[[int, int], None] | None = None,
    methods: Sequence[str] | None = None,
) -> DoctorReport:
    """Run the checks, then measure `methods` on sample prompts until `prompts` or `seconds` are used up.

    At least `LEAST_PROMPTS` are measured, however short the time: a verdict on less would be chance. The report is
    stored for `tenant` together with what was measured before of other methods.

    Args:
        documents: built-in texts for None; `methods`: for None what `auto` tries.

    Raises:
        InputError: an unknown method, one that does not reuse, or one that cannot run on such prompts.
    """
    if prompts < LEAST_PROMPTS:
        raise InputError("prompts", f"must be at least {LEAST_PROMPTS}: fewer can pass nothing", prompts)
    if methods is not None and (isinstance(methods, str) or not methods):
        raise InputError("methods", "must be a list of at least one method", methods)
    given = builtin_documents() if documents is None else check_documents(documents)
    began = time.perf_counter()
    named = engine.reader.auto_order if methods is None else methods
    seen = {name: _seen(engine, name) for name in dict.fromkeys(named)}
    documents = fit_documents(engine, given)
    count = min(prompts, max(len(documents), LEAST_PROMPTS))
    samples = sample_prompts(documents, fit_documents(engine, builtin_documents()), count)
    runs = _runs(engine, "?", samples[0][0])
    for found in seen.values():  # before anything is computed
        engine.reader.check(_placed(runs, found.method, range(len(samples[0][0]))), found.method, tenant)
    checks = tuple(check_endpoints(engine, documents))
    if not all(c.passed for c in checks):
        samples = []
    _prepare(engine, [m.method for m in seen.values()], documents, samples, tenant)
    for done, (chosen, target) in enumerate(samples):
        if done >= LEAST_PROMPTS and time.perf_counter() - began > seconds:
            break
        _measure(engine, chosen, target, tenant, list(seen.values()))
        if progress is not None:
            progress(done + 1, len(samples))
    for found in seen.values():
        if engine.reader.identity(found.method) != found.trained:
            found.refused = "its writer was replaced while it was measured"
    limits = engine.settings.gate_max_kl, engine.settings.gate_min_top1
    report = DoctorReport(
        model=engine.model.name,
        fingerprint=engine.model.fingerprint.digest,
        writer=engine.writer.digest,
        checks=checks,
        verdicts=tuple(_verdict(name, found).judged(*limits) for name, found in seen.items()),
        max_kl=limits[0],
        min_top1=limits[1],
        seconds=time.perf_counter() - began,
    )
    report = report.beside(stored_report(engine, tenant) or engine.verdict(tenant))
    outcome = engine.store.write_note(namespace(tenant), note_name(engine), report.as_dict())
    if isinstance(outcome, Failure):
        log.warning("the gate's verdict could not be stored (%s) and holds for this process only", outcome.reason)
    return report


def note_name(engine: Engine) -> str:
    """Name of the stored report: another model, table, dtype or writer is another verdict."""
    return f"gate3-{engine.model.fingerprint.digest[:40]}-{engine.writer.digest[:24]}"


def stored_report(engine: Engine, tenant: str | None) -> DoctorReport | None:
    """The report as it was stored, whatever helper model its methods asked."""
    note = engine.store.read_note(namespace(tenant), note_name(engine))
    try:
        return None if note is None else DoctorReport.from_dict(note)
    except (TypeError, KeyError, AttributeError):
        log.warning("the stored gate verdict is of another version and counts as none; run doctor")
        return None


def _reusing(name: str) -> Method:
    if name == "auto":
        raise InputError("methods", "auto runs what was measured; name the methods to measure", name)
    method = find_method(name)
    if not method.reuses:
        raise InputError("methods", "full prefill is what the others are measured against", name)
    return method


def _seen(engine: Engine, name: str) -> _Seen:
    """Nothing yet of the method, with what a verdict on it will hold for."""
    method, helper = _reusing(name), engine.reader.helper
    asked = helper.fingerprint.digest if helper and method.selector.probe is Probe.HELPER else ""
    return _Seen(method, asked, engine.reader.identity(method))


def _runs(engine: Engine, question: str, documents: Sequence[Document]) -> tuple[Run, ...]:
    return engine.prompt(question, documents).runs(engine.model.tokenizer)


def _placed(runs: Sequence[Run], method: Method, ranking: Sequence[int]) -> Placement:
    return place_runs(runs, method.order, ranking if method.needs_ranking else (), method.moved)


def _prepare(
    engine: Engine,
    methods: Sequence[Method],
    documents: Sequence[Document],
    samples: Sequence[tuple[list[Document], int]],
    tenant: str | None,
) -> None:
    """Compile as the methods that name a recipe want it, the way a user would have: all documents at once, since a
    recipe that looks for neighbours must not find, and remember, only those of the samples; then what fills prompts."""
    filling = {d.id: d for chosen, _ in samples for d in chosen}
    for method in {m.writer: m for m in methods if m.writer}.values() if filling else ():
        engine.compile(documents, tenant, gate=False, method=method.name)
        engine.compile(list(filling.values()), tenant, gate=False, method=method.name)


def _measure(engine: Engine, documents: list[Document], target: int, tenant: str | None, seen: Sequence[_Seen]) -> None:
    """Full prefill answers a question about the target; its answer is then forced through every method."""
    question = make_question(engine, documents[target], tenant)
    # the document that was asked about, then the others as BM25 has them
    ranking = [target, *(n for n in ranked_documents(question, documents) if n != target)]
    runs = _runs(engine, question, documents)
    # a method that reorders is held against the truth in the given order, which is what the user would have had
    true = truth(engine, place_runs(runs), tenant, _ANSWER_TOKENS)
    for found in seen:
        if found.refused:
            continue
        try:
            close = compare(engine, _placed(runs, found.method, ranking), found.method, tenant, true)
        except InputError as error:  # a budget that pays for choosing on shorter prompts, but not on this one
            found.refused = f"cannot run on every sample prompt: {error}"
            continue
        ledger = close.spoken.ledger
        found.kls.append(close.kl)
        found.agree.append(close.agree)
        found.reused += sum(ledger.tokens[p] for p in _APART)
        found.charged.append(0.0 if ledger.spending is None else ledger.spending.charged_share)


def _verdict(name: str, found: _Seen) -> Verdict:
    if found.refused or not found.kls:
        nothing, reason = float("nan"), found.refused or "not measured: an endpoint check failed"
        return Verdict(name, False, nothing, nothing, nothing, 0, 0, 0, reason, nothing, found.helper, found.trained)
    kl, top1 = torch.cat(found.kls), float(torch.cat(found.agree).mean())
    return Verdict(
        method=name,
        passed=False,
        mean_kl=float(kl.mean()),
        p95_kl=float(kl.quantile(0.95)),
        top1=top1,
        prompts=len(found.kls),
        tokens=kl.numel(),
        reused=found.reused,
        reason="",
        charged=sum(found.charged) / len(found.charged),
        helper=found.helper,
        trained=found.trained,
    )
