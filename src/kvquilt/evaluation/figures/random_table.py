"""Selectors beside random rows, as a table."""

from __future__ import annotations

from kvquilt.evaluation.figures.random_draws import LEAST_DRAWS, is_random
from kvquilt.evaluation.figures.statistics import Outcome
from kvquilt.evaluation.figures.summary import Against, ArmSummary, Draws, Summary
from kvquilt.evaluation.figures.table import NOTHING, Table, interval, nats, nats_around
from kvquilt.evaluation.run.arms import find_arm
from kvquilt.repair.nothing import Nothing

_SAYS = {Outcome.WIN: "beats it", Outcome.TIE: "not told from it", Outcome.LOSS: "worse"}


def random_table(summary: Summary, score: str) -> tuple[Table, ...]:
    """One table, or none where the run has no random rows of several seeds."""
    if not summary.random:
        return ()
    selectors = [arm for arm in summary.arms if _held(arm) is not None]
    head = ("arm", "n", "charged", score, f"{score} to random", "KL", "KL to random", "held against")
    rows = (*map(_drawn, summary.random), *map(_selector, selectors))
    notes = [
        "Random: the mean over draws, and the least and the greatest of a draw. A selector is held, in pairs, against "
        "those over the same compiled segments that are charged most nearly as much; unequal budgets do not compare."
    ]
    notes += [
        f"{each.name}: {len(each.arms)} draws; a control needs {LEAST_DRAWS}."
        for each in summary.random
        if len(each.arms) < LEAST_DRAWS
    ]
    alone = [arm.method for arm in summary.arms if _held(arm) is None and arm.items and _selects(arm.method)]
    if alone:
        notes.append(f"No draws over the same segments for {', '.join(alone)}.")
    return (Table("Selectors against random rows", head, rows, tuple(notes)),)


def _held(arm: ArmSummary) -> Against | None:
    by_kl = None if arm.fidelity is None else arm.fidelity.random
    return by_kl if arm.scored is None or arm.scored.random is None else arm.scored.random


def _selects(name: str) -> bool:
    arm = find_arm(name)
    return arm.is_method and not is_random(name) and not isinstance(arm.method.selector, Nothing)


def _drawn(draws: Draws) -> tuple[str, ...]:
    value = NOTHING
    if draws.score is not None and draws.score_range is not None:
        value = f"{interval(draws.score)}, draws {draws.score_range[0]:.3f} to {draws.score_range[1]:.3f}"
    kl = f"{nats_around(draws.kl)}, draws {nats(draws.kl_range[0])} to {nats(draws.kl_range[1])}"
    name = f"{draws.name} ({len(draws.arms)} draws)"
    return name, str(draws.items), f"{draws.charged:.1%}", value, NOTHING, kl, NOTHING, NOTHING


def _selector(arm: ArmSummary) -> tuple[str, ...]:
    scored, fidelity, held = arm.scored, arm.fidelity, _held(arm)
    return (
        arm.method,
        str(arm.items),
        NOTHING if arm.work is None else f"{arm.work.charged:.1%}",
        NOTHING if scored is None else interval(scored.score),
        _said(None if scored is None else scored.random),
        NOTHING if fidelity is None else nats_around(fidelity.kl),
        _said(None if fidelity is None else fidelity.random),
        NOTHING if held is None else held.arm,
    )


def _said(against: Against | None) -> str:
    return NOTHING if against is None else f"{interval(against.difference, signed=True)} {_SAYS[against.outcome]}"
