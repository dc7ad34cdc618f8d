"""A run's summary as tables of text, the same on a terminal, in Markdown and on a page. Fidelity comes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvquilt.evaluation.arms import AGAIN
from kvquilt.evaluation.damage import LEAST_BASE
from kvquilt.evaluation.statistics import Interval
from kvquilt.evaluation.summary import ArmSummary, Fidelity, Scored, Summary, Work

_NOTHING = "-"
_OUTCOME = "Outcome against full prefill, by the interval; (+ items that only the arm gets right, - only full prefill)."


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, each as long as `head`; the first names the arm.

    Attributes:
        notes: what must be known to read it, a sentence each.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def tables(summary: Summary, score: str) -> tuple[Table, ...]:
    """Fidelity, scores, damage, work.

    Args:
        score: the name of the task's own score.
    """
    return (
        _table("How far from full prefill", summary, _FIDELITY, _floor(summary)),
        _table(f"Answers ({score})", summary, {score: _SCORE, **_ANSWERS}, (_OUTCOME,)),
        _table("Damage", summary, _DAMAGE, _base(summary)),
        _table("Work", summary, _WORK, ("First token: median over single readings, in full prefill's own time.",)),
    )


def verdict(summary: Summary) -> str:
    """Whether the task says anything about reuse on this model: a sentence."""
    helped = summary.documents_help
    if helped is None:
        return "Whether the documents help was not measured: one of both references gave no answers."
    if helped.low > 0:
        return f"The documents help: full prefill scores {interval(helped)} above no context."
    return (
        f"The documents do not clearly help: full prefill scores {interval(helped)} above no context, so scores say "
        "nothing about reuse on this model; fidelity does."
    )


def against_fewer(summary: Summary) -> list[str]:
    """A sentence for each method that was held against full prefill over fewer documents."""
    told = {"win": "beats", "tie": "is not told from", "loss": "is beaten by"}
    return [
        f"{arm.method} {told[arm.scored.fewer.outcome]} {arm.scored.fewer.arm}, which takes about as long to the first "
        f"token: {interval(arm.scored.fewer.difference, signed=True)}."
        for arm in summary.arms
        if arm.scored is not None and arm.scored.fewer is not None
    ]


def interval(found: Interval, signed: bool = False) -> str:
    """Value and interval: ``0.412 [0.35, 0.47]``."""
    sign = "+" if signed else ""
    return f"{found.value:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


Cells = Mapping[str, Callable[[ArmSummary], str]]


def _table(title: str, summary: Summary, cells: Cells, notes: tuple[str, ...]) -> Table:
    rows = [(named(arm.method), _count(arm), *(cell(arm) for cell in cells.values())) for arm in summary.arms]
    # an arm without anything to say here, such as full prefill's distance to itself, has no row
    kept = tuple(row for row in rows if any(cell != _NOTHING for cell in row[2:]))
    return Table(title, ("arm", "n", *cells), kept, notes)


def named(method: str) -> str:
    """An arm as tables call it."""
    return f"{method} (noise floor)" if method == AGAIN else method


def _count(arm: ArmSummary) -> str:
    return f"{arm.items} ({arm.refused} refused)" if arm.refused else str(arm.items)


def _floor(summary: Summary) -> tuple[str, ...]:
    has = any(arm.method == AGAIN for arm in summary.arms)
    return () if has else (f"No noise floor: the run has no {AGAIN}.",)


def _base(summary: Summary) -> tuple[str, ...]:
    damages = [arm.scored.damage for arm in summary.arms if arm.scored is not None and arm.scored.damage is not None]
    if not damages:
        return ("Damage is told where none, no-context and full prefill answer.",)
    notes = ("Of the |D| questions that full prefill answers rightly and no context wrongly.",)
    few = f"Fewer than {LEAST_BASE} questions in D carry no claim."
    return notes if all(damage.claims for damage in damages) else (*notes, few)


def _of_fidelity(cell: Callable[[Fidelity], str]) -> Callable[[ArmSummary], str]:
    return lambda arm: _NOTHING if arm.fidelity is None else cell(arm.fidelity)


def _of_scored(cell: Callable[[Scored], str]) -> Callable[[ArmSummary], str]:
    return lambda arm: _NOTHING if arm.scored is None else cell(arm.scored)


def _of_work(cell: Callable[[Work], str]) -> Callable[[ArmSummary], str]:
    return lambda arm: _NOTHING if arm.work is None else cell(arm.work)


def _nats(value: float) -> str:
    """Three digits, and below that the order: the noise floor is to be seen."""
    return f"{value:.3f}" if abs(value) >= 0.0005 or not value else f"{value:.0e}"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.1%}"


def _with_shares(name: str, scored: Scored) -> str:
    if scored.damage is None or scored.shares is None:
        return _NOTHING
    value: float | None = getattr(scored.damage, name)
    around: Interval | None = getattr(scored.shares, name)
    if value is None or around is None:
        return _share(value)
    return f"{value:.1%} [{around.low:.1%}, {around.high:.1%}]"


def _p(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.3f}" if value >= 0.001 else "<0.001"


_FIDELITY: Cells = {
    "KL": _of_fidelity(lambda f: f"{_nats(f.kl.value)} [{_nats(f.kl.low)}, {_nats(f.kl.high)}]"),
    "KL p95": _of_fidelity(lambda f: _nats(f.own.p95)),
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
_DAMAGE: Cells = {
    "|D|": _of_scored(lambda s: _NOTHING if s.damage is None else str(s.damage.base)),
    **{name: _of_scored(partial(_with_shares, name)) for name in ("damage", "recovery", "collateral")},
    "gains": _of_scored(lambda s: _NOTHING if s.damage is None else str(s.damage.gains)),
}
_WORK: Cells = {
    "reused": _of_work(lambda w: _share(w.reused)),
    "charged": _of_work(lambda w: _share(w.charged)),
    "FLOPs": _of_work(lambda w: _share(w.flops)),
    "first token": _of_work(lambda w: f"{w.first_token:.2f}"),
    "fallbacks": _of_work(lambda w: ", ".join(f"{name} {count}" for name, count in w.fallbacks.items()) or _NOTHING),
}
