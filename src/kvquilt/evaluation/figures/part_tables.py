"""Scores and damage of parts of a run, as tables: a column for each part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvquilt.evaluation.figures.breakdown import MANY_GROUPS
from kvquilt.evaluation.figures.damage import LEAST_BASE
from kvquilt.evaluation.figures.summary import Part, PartScore, Summary
from kvquilt.evaluation.figures.table import NOTHING, Table, interval, named

_MOST = 12  # columns


def part_tables(summary: Summary, score: str) -> tuple[Table, ...]:
    """By kind, and group by group; none where the summary has no such parts."""
    made = []
    if summary.by_kind:
        made.append(_table(f"By kind ({score})", summary, summary.by_kind, _score, ()))
        lost = (
            "Of the questions that full prefill answers rightly and no context wrongly, those that the arm answers "
            f"wrongly. Fewer than {LEAST_BASE} of a kind carry no claim.",
        )
        made.append(_table("Damage by kind", summary, summary.by_kind, _lost, lost))
    if summary.by_group:
        few = f"Fewer than {MANY_GROUPS} groups: every interval above is too short, so here they are one by one."
        made.append(_table(f"Group by group ({score})", summary, summary.by_group, _score, (few,)))
    return tuple(table for table in made if table.rows)


def _table(
    title: str, summary: Summary, parts: Sequence[Part], cell: Callable[[PartScore], str], notes: tuple[str, ...]
) -> Table:
    largest = sorted(parts, key=lambda part: -part.items)[:_MOST]
    shown = [part for part in parts if part in largest]
    if len(shown) < len(parts):
        notes = (*notes, f"The {_MOST} with the most items, of {len(parts)}.")
    rows = []
    for arm in summary.arms:
        cells = [NOTHING if (found := part.arms.get(arm.method)) is None else cell(found) for part in shown]
        if any(each != NOTHING for each in cells):
            rows.append((named(arm.method), *cells))
    return Table(title, ("arm", *(f"{part.name} ({part.items})" for part in shown)), tuple(rows), notes)


def _score(part: PartScore) -> str:
    return f"{part.score:.3f}" if part.around is None else interval(part.around)


def _lost(part: PartScore) -> str:
    return f"{part.lost} of {part.base}" if part.base else NOTHING
