"""A run's summary as tables of text, the same on a terminal, in Markdown and on a page. Fidelity comes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from kvquilt.evaluation.figures.damage import LEAST_BASE
from kvquilt.evaluation.figures.part_tables import part_tables
from kvquilt.evaluation.figures.random_table import random_table
from kvquilt.evaluation.figures.statistics import Interval
from kvquilt.evaluation.figures.summary import ArmSummary, Fidelity, Scored, Summary, Timed, Work
from kvquilt.evaluation.figures.table import NOTHING, Table, interval, named, nats, nats_around
from kvquilt.evaluation.run.arms import AGAIN

_OUTCOME = "Outcome against full prefill, by the interval; (+ items that only the arm gets right, - only full prefill)."
_NO_MARKER = "No marker: answers without the words behind which the task looks; they score as empty, damaged or not."


def tables(summary: Summary, score: str) -> tuple[Table, ...]:
    """Fidelity, scores, damage, work; then what is random, and parts of the run, where there is something to say.

    Args:
        score: the name of the task's own score.
    """
    marked = any(arm.scored is not None and arm.scored.unmarked is not None for arm in summary.arms)
    answers = {score: _SCORE, **_ANSWERS, **(_MARKER if marked else {})}
    return (
        _table("How far from full prefill", summary, _FIDELITY, _floor(summary)),
        _table(f"Answers ({score})", summary, answers, (_OUTCOME, _NO_MARKER) if marked else (_OUTCOME,)),
        _table("Damage", summary, _DAMAGE, _base(summary)),
        _table("Work", summary, {**_WORK, **(_TIMED if summary.measured else _SINGLE), **_FALLBACKS}, _times(summary)),
        *random_table(summary, score),
        *part_tables(summary, score),
    )


def verdict(helped: Interval | None) -> str:
    """Whether the task says anything about reuse on this model, by `Summary.documents_help`: a sentence."""
    if helped is None:
        return "Whether the documents help was not measured: one of both references gave no answers."
    if helped.low > 0:
        return f"The documents help: full prefill scores {interval(helped)} above no context."
    return (
        f"The documents do not clearly help: full prefill scores {interval(helped)} above no context, so scores say "
        "nothing about reuse on this model; fidelity does."
    )


Cells = Mapping[str, Callable[[ArmSummary], str]]


def _table(title: str, summary: Summary, cells: Cells, notes: tuple[str, ...]) -> Table:
    rows = [(named(arm.method), _count(arm), *(cell(arm) for cell in cells.values())) for arm in summary.arms]
    # an arm without anything to say here, such as full prefill's distance to itself, has no row
    kept = tuple(row for row in rows if any(cell != NOTHING for cell in row[2:]))
    return Table(title, ("arm", "n", *cells), kept, notes)


def _count(arm: ArmSummary) -> str:
    return f"{arm.items} ({arm.refused} refused)" if arm.refused else str(arm.items)


def _floor(summary: Summary) -> tuple[str, ...]:
    has = any(arm.method == AGAIN for arm in summary.arms)
    return () if has else (f"No noise floor: the run has no {AGAIN}.",)


def _times(summary: Summary) -> tuple[str, ...]:
    """Which sort of figure the times to the first token are."""
    floor = summary.prefix_hit
    if floor is None:
        return ("First token: single readings that nothing warmed up; their median, in full prefill's own time.",)
    prompts = "a prompt" if floor.prompts == 1 else f"{floor.prompts} prompts"
    return (
        f"First token: measured, {floor.repeats} repeats on {prompts} of median length, arms in turns, warmed up; "
        "median [quartiles] in full prefill's own time of the same round. Processor: the same of all threads' time.",
        f"The floor is a prefix hit, the question alone on a ready cache: {_timed_ratio(floor)}.",
        "Pays after: requests over a prompt's documents from which on compiling them has paid.",
    )


def _base(summary: Summary) -> tuple[str, ...]:
    damages = [arm.scored.damage for arm in summary.arms if arm.scored is not None and arm.scored.damage is not None]
    if not damages:
        return ("Damage is told where none, no-context and full prefill answer.",)
    notes = ("Of the |D| questions that full prefill answers rightly and no context wrongly.",)
    few = f"Fewer than {LEAST_BASE} questions in D carry no claim."
    return notes if all(damage.claims for damage in damages) else (*notes, few)


def _of_fidelity(cell: Callable[[Fidelity], str]) -> Callable[[ArmSummary], str]:
    return lambda arm: NOTHING if arm.fidelity is None else cell(arm.fidelity)


def _of_scored(cell: Callable[[Scored], str]) -> Callable[[ArmSummary], str]:
    return lambda arm: NOTHING if arm.scored is None else cell(arm.scored)


def _of_work(cell: Callable[[Work], str]) -> Callable[[ArmSummary], str]:
    return lambda arm: NOTHING if arm.work is None else cell(arm.work)


def _of_timed(cell: Callable[[Timed], str]) -> Callable[[ArmSummary], str]:
    return lambda arm: NOTHING if arm.work is None or arm.work.timed is None else cell(arm.work.timed)


def _timed_ratio(timed: Timed) -> str:
    return f"{timed.ratio:.3f} [{timed.low:.3f}, {timed.high:.3f}]"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _with_shares(name: str, scored: Scored) -> str:
    if scored.damage is None or scored.shares is None:
        return NOTHING
    value: float | None = getattr(scored.damage, name)
    around: Interval | None = getattr(scored.shares, name)
    if value is None or around is None:
        return _share(value)
    return f"{value:.1%} [{around.low:.1%}, {around.high:.1%}]"


def _p(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}" if value >= 0.001 else "<0.001"


_FIDELITY: Cells = {
    "KL": _of_fidelity(lambda f: nats_around(f.kl)),
    "KL p95": _of_fidelity(lambda f: nats(f.own.p95)),
    "top-1": _of_fidelity(lambda f: f"{f.own.top1:.3f}"),
    "KL recovered": _of_fidelity(lambda f: _share(f.kl_recovery)),
    "NLL gap": _of_fidelity(lambda f: f"{f.nll_gap:+.3f}"),
    "p (to none)": _of_fidelity(lambda f: _p(f.p)),
}
_SCORE = _of_scored(lambda s: interval(s.score))
_ANSWERS: Cells = {
    "to full": _of_scored(lambda s: interval(s.difference, signed=True)),
    "outcome": _of_scored(lambda s: f"{s.outcome} (+{s.only_arm} -{s.only_full})"),
    "p": _of_scored(lambda s: _p(s.p)),
    "right": _of_scored(lambda s: _share(s.right)),
    "micro F1": _of_scored(lambda s: interval(s.micro_f1)),
    "F1 recovered": _of_scored(lambda s: _share(s.f1_recovery)),
}
_MARKER: Cells = {
    "no marker": lambda arm: (
        NOTHING if arm.scored is None or arm.scored.unmarked is None else f"{arm.scored.unmarked} of {arm.items}"
    )
}
_DAMAGE: Cells = {
    "|D|": _of_scored(lambda s: NOTHING if s.damage is None else str(s.damage.base)),
    **{name: _of_scored(partial(_with_shares, name)) for name in ("damage", "recovery", "collateral")},
    "gains": _of_scored(lambda s: NOTHING if s.damage is None else str(s.damage.gains)),
}
_WORK: Cells = {
    "reused": _of_work(lambda w: _share(w.reused)),
    "charged": _of_work(lambda w: _share(w.charged)),
    "FLOPs": _of_work(lambda w: _share(w.flops)),
}
_SINGLE: Cells = {"first token": _of_work(lambda w: f"{w.first_token:.2f}")}
_TIMED: Cells = {
    "first token": _of_timed(lambda t: _timed_ratio(t)),
    "seconds": _of_timed(lambda t: f"{t.seconds:.3g}"),
    "processor": _of_timed(lambda t: f"{t.processor:.3f}"),
    "pays after": _of_timed(lambda t: NOTHING if t.break_even is None else f"{t.break_even:.1f}"),
}
_FALLBACKS: Cells = {
    "fallbacks": _of_work(lambda w: ", ".join(f"{name} {count}" for name, count in w.fallbacks.items()) or NOTHING)
}
