"""Figures of runs in Markdown: tables, what they say, where they come from. No question, document or answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kvquilt.evaluation.figures.table import Table
from kvquilt.evaluation.figures.tables import tables
from kvquilt.evaluation.report.overview import environment, overview, remarks
from kvquilt.evaluation.report.told import Told
from kvquilt.evaluation.report.visible import visible


def markdown(runs: Sequence[Told]) -> str:
    """One section for each run, behind an overview where there are several."""
    parts = ["# Evaluation"]
    if len(runs) > 1:
        parts += _table(overview(runs))
    for run in runs:
        parts += [f"## {plain(run.title)}", f"{run.extent}."]
        parts += [plain(sentence) for sentence in remarks(run)]
        for table in tables(run.summary, run.score):
            parts += _table(table)
        parts += _table(environment(run))
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """`text` as a line that means nothing to Markdown, nor to HTML."""
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", visible(" ".join(text.split())))


def _table(table: Table) -> Iterator[str]:
    yield f"### {plain(table.title)}"
    rows = [table.head, tuple("---" for _ in table.head), *table.rows]
    yield "\n".join("| " + " | ".join(cell if row is rows[1] else plain(cell) for cell in row) + " |" for row in rows)
    yield from map(plain, table.notes)
