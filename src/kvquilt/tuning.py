"""Tuning: the cheapest method that keeps the answers, measured on a user's own documents.

Candidates are recipes x methods x budgets. They are compared on one half of the prompts, and the choice is then
measured on the other half, whose target documents and questions it has never seen; only that second figure is reported
as what to expect.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvquilt.errors import InputError
from kvquilt.fidelity import Spoken, compare, truth
from kvquilt.gate_report import LEAST_PROMPTS
from kvquilt.gate_samples import fit_documents
from kvquilt.identity import digest_fields, namespace
from kvquilt.placement import place_runs
from kvquilt.prompt import Document
from kvquilt.repair.presets import Method, find_method
from kvquilt.repair.written import with_option
from kvquilt.store import Failure
from kvquilt.tuning_report import Trial, TuneReport
from kvquilt.tuning_samples import Question, Sample, halved_samples
from kvquilt.writers.encoder import Encoder
from kvquilt.writers.loaded import Usable, method_of

if TYPE_CHECKING:
    from kvquilt.engine import Engine

log = logging.getLogger(__name__)
_ANSWER_TOKENS = 16
BUDGETS = ("2%", "5%", "10%", "15%", "30%")
RECIPES = ("", "isolated")
_UNBUDGETED = ("none", "retrieved-document", "epic:k=16", "ape")
_BUDGETED = ("epic:k=4096", "cacheblend", "prophetkv", "infoflow", "infoflow-reorder", "agentkvshift", "spread")


def candidates(trained: Mapping[str, Usable] = MappingProxyType({})) -> tuple[str, ...]:
    """What is tried by default: every recipe with every method, at every budget where it takes one.

    Args:
        trained: writers at hand by name, each one recipe more; its own method stands first, where others have `none`.
            An encoder's documents have no rows to repair, so there is its own method alone.
    """
    written = [*_UNBUDGETED, *(with_option(name, budget) for name in _BUDGETED for budget in BUDGETS)]
    out = [method_of(name, writer) for name, writer in trained.items()]
    out += [with_option(name, f"writer={recipe}") if recipe else name for name in written for recipe in RECIPES]
    repaired = [name for name, writer in trained.items() if not isinstance(writer, Encoder)]
    out += [with_option(name, f"writer={recipe}") for recipe in repaired for name in written if name != "none"]
    return tuple(out)


@dataclass(slots=True)
class _Seen:
    """One candidate's measurements, a number per prompt."""

    kl: list[list[float]] = field(default_factory=list)
    agree: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    full_f1: list[float] = field(default_factory=list)
    charged: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)

    def trial(self, method: str) -> Trial:
        """All prompts together."""
        tokens = [v for each in self.kl for v in each]
        mean_kl = statistics.fmean(tokens)
        # of every prompt's own figure: tokens of one answer are not independent
        each = [math.exp(-statistics.fmean(v)) for v in self.kl]
        fidelity, score = math.exp(-mean_kl), None
        if self.f1:
            full = statistics.fmean(self.full_f1)
            if not full:
                raise InputError("questions", "full prefill answers none of them as given, so there is nothing to keep")
            score = statistics.fmean(self.f1) / full
            each = [a / full for a in self.f1]
        error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf
        return Trial(
            method=method, quality=fidelity if score is None else score, fidelity=fidelity, score=score, error=error,
            mean_kl=mean_kl, top1=statistics.fmean(self.agree), charged=statistics.fmean(self.charged),
            first_token=statistics.median(self.ratio), prompts=len(self.kl),
        )  # fmt: skip


def tune(
    engine: Engine,
    documents: Sequence[Document],
    questions: Sequence[Question] = (),
    *,
    target: float = 0.98,
    methods: Sequence[str] | None = None,
    prompts: int = 24,
    seconds: float = 1800.0,
    tenant: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TuneReport:
    """Measure candidates on half of the prompts, choose, measure the choice on the other half, store the report.

    Args:
        questions: the user's own; without any, the model writes them from the documents. Documents for each are the
            retriever's best. Where all have answers, task score decides, else fidelity.
        target: what quality must reach, as a share of full prefill's.
        methods: candidates as the command line writes them; by default `candidates` with the trained writers at hand.
        prompts: at most, both halves together; `seconds` may end the first half earlier, not before `LEAST_PROMPTS`.

    Raises:
        InputError: too few documents or questions for two halves, a target outside 0 to 1, an unknown method.
    """
    if not 0 < target <= 1:
        raise InputError("target", "must lie above 0 and be at most 1", target)
    if prompts < 2 * LEAST_PROMPTS:
        raise InputError("prompts", f"must be at least {2 * LEAST_PROMPTS}: half of them choose, half report", prompts)
    names = list(dict.fromkeys(candidates(engine.reader.trained) if methods is None else methods))
    trying = {name: find_method(name) for name in names}
    if not trying:
        raise InputError("methods", "at least one is needed", names)
    for name, method in trying.items():
        if not method.reuses:
            raise InputError("methods", "full prefill is the truth that the others are measured against", name)
    began = time.perf_counter()
    known = bool(questions) and all(q.answers for q in questions)
    if not known:  # a score over some of the prompts cannot be compared with a target for all
        questions = [Question(q.text) for q in questions]
    halves = halved_samples(engine, documents, questions, prompts, tenant)
    # all of them first: a recipe that looks for neighbours must not find only those of one prompt, and remember them
    _compile(engine, fit_documents(engine, documents), trying, tenant)
    total = sum(map(len, halves))
    seen, refused = {name: _Seen() for name in trying}, dict[str, str]()
    for done, sample in enumerate(halves[0]):
        if done >= LEAST_PROMPTS and time.perf_counter() - began > seconds:
            break
        _measure(engine, sample, {n: m for n, m in trying.items() if n not in refused}, seen, refused, tenant)
        if progress is not None:
            progress(done + 1, total)
    trials = sorted((s.trial(n) for n, s in seen.items() if n not in refused), key=lambda t: (t.charged, -t.quality))
    chosen = next((t.method for t in trials if t.quality >= target), None)
    held_out = None
    if chosen is not None:
        again = {chosen: _Seen()}
        for done, sample in enumerate(halves[1]):
            _measure(engine, sample, {chosen: trying[chosen]}, again, refused, tenant)
            if progress is not None:
                progress(len(halves[0]) + done + 1, total)
        # one that cannot run on all of them does not hold
        held_out = None if chosen in refused else again[chosen].trial(chosen)
    report = TuneReport(
        model=engine.model.name, fingerprint=engine.model.fingerprint.digest, writer=engine.writer.digest,
        target=target, judged_by="score" if known else "fidelity", trials=tuple(trials), chosen=chosen,
        held_out=held_out, seconds=time.perf_counter() - began, refused=refused,
    )  # fmt: skip
    outcome = engine.store.write_note(namespace(tenant), note_name(engine), report.as_dict())
    if isinstance(outcome, Failure):
        log.warning("the tuned method could not be stored (%s) and holds for this process only", outcome.reason)
    return report


def stored_tuning(engine: Engine, tenant: str | None) -> TuneReport | None:
    """The stored report for this model, writer and tenant; one of another version counts as none."""
    note = engine.store.read_note(namespace(tenant), note_name(engine))
    if note is None:
        return None
    try:
        report = TuneReport.from_dict(note)
        if report.chosen is not None:
            find_method(report.chosen)
        _ = report.accepted, report.summary  # figures of another type show when they are used
    except (TypeError, ValueError, KeyError, AttributeError):
        log.warning("the stored tuning is of another version and counts as none; run tune")
        return None
    return report


def note_name(engine: Engine) -> str:
    """Name of the stored report: another model, table, dtype, writer or set of trained writers is another choice."""
    name = f"tuned1-{engine.model.fingerprint.digest[:40]}-{engine.writer.digest[:24]}"
    if not (loaded := sorted(engine.reader.identities)):
        return name
    return f"{name}-{digest_fields('kvquilt 2026-11 loaded writers v1', [('writers', ' '.join(loaded))])[:24]}"


def _measure(
    engine: Engine,
    sample: Sample,
    trying: dict[str, Method],
    seen: dict[str, _Seen],
    refused: dict[str, str],
    tenant: str | None,
) -> None:
    """Every candidate on one prompt; one that cannot run there is noted in `refused`."""
    runs = engine.prompt(sample.question, sample.documents).runs(engine.model.tokenizer)
    true = truth(engine, place_runs(runs), tenant, _ANSWER_TOKENS)
    _compile(engine, sample.documents, trying, tenant)  # what was only put in to fill a prompt
    for name, method in trying.items():
        ranking = sample.ranking if method.needs_ranking else ()
        placement = place_runs(runs, method.order, ranking, method.moved)
        try:
            close = compare(engine, placement, method, tenant, true, own=_ANSWER_TOKENS if sample.answers else 0)
        except InputError as error:
            refused[name] = str(error)
            continue
        found, ledger = seen[name], close.spoken.ledger
        found.kl.append(close.kl.tolist())
        found.agree.append(float(close.agree.mean()))
        found.charged.append(ledger.spending.charged_share if ledger.spending else 0.0)
        found.ratio.append(true.ledger.reading_seconds / max(1e-9, ledger.reading_seconds))
        if sample.answers:
            found.f1.append(_f1(engine, close.spoken, sample.answers))
            found.full_f1.append(_f1(engine, true, sample.answers))


def _compile(engine: Engine, documents: Sequence[Document], trying: dict[str, Method], tenant: str | None) -> None:
    """Compile by the recipe of every candidate."""
    for name in {method.writer: name for name, method in trying.items()}.values():
        engine.compile(documents, tenant, gate=False, method=name)


def _f1(engine: Engine, spoken: Spoken, answers: Iterable[str]) -> float:
    """Best token F1 over the known answers: words, case-folded, without punctuation."""
    ids = [i for i in spoken.ids if i not in engine.model.stop_ids]
    said = _bag(engine.model.tokenizer.decode(ids, skip_special_tokens=True))
    best = 0.0
    for answer in answers:
        wanted = _bag(answer)
        shared = sum((said & wanted).values())
        best = max(best, 2 * shared / max(1, sum(said.values()) + sum(wanted.values())))
    return best


def _bag(text: str) -> Counter[str]:
    return Counter("".join(c if c.isalnum() else " " for c in text.casefold()).split())
