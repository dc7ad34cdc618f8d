"""Runs as one HTML page that needs nothing but itself: no network, no font, no file beside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from importlib.resources import files

from kvquilt.evaluation.figures.random_draws import is_random
from kvquilt.evaluation.figures.statistics import Interval
from kvquilt.evaluation.figures.summary import ArmSummary
from kvquilt.evaluation.figures.table import Table
from kvquilt.evaluation.figures.tables import tables
from kvquilt.evaluation.report.browser import browser, shown
from kvquilt.evaluation.report.overview import environment, overview, remarks
from kvquilt.evaluation.report.plot import Point, scatter
from kvquilt.evaluation.report.told import Told
from kvquilt.evaluation.run.arms import find_arm


def page(runs: Sequence[Told], most: int) -> str:
    """All runs, with at most `most` items to browse of each.

    The page's policy lets its own script run and nothing else, whatever stands in a document.
    """
    style, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("look.css", "look.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = "".join(f'<li><a href="#run-{n}">{shown(run.title)}</a></li>' for n, run in enumerate(runs))
    several = len(runs) > 1
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Evaluation: {shown(', '.join(run.title for run in runs))}</title><style>{style}</style></head><body>"
        '<a class="skip" href="#run-0">Skip to the first run</a><header><h1>Evaluation</h1>'
        + (f'<nav aria-label="Runs"><ul>{links}</ul></nav>' if several else "")
        + "</header><main>"
        + (_table(overview(runs)) if several else "")
        + "".join(_run(run, most, f"run-{n}") for n, run in enumerate(runs))
        + f"</main><script>{script}</script></body></html>\n"
    )


def _run(run: Told, most: int, name: str) -> str:
    figures, *others = tables(run.summary, run.score)
    return (
        f'<section class="run" id="{name}"><h2>{shown(run.title)}</h2><p>{shown(run.extent)}.</p>'
        + "".join(f"<p>{shown(sentence)}</p>" for sentence in remarks(run))
        + _table(figures)
        + _plots(run)
        + "".join(map(_table, others))
        + browser(run, most, name)
        + _table(environment(run))
        + "</section>"
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{shown(cell)}</th>' for cell in table.head)
    rows = "".join(
        f'<tr><th scope="row">{shown(first)}</th>{"".join(f"<td>{shown(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in table.rows
    )
    notes = "".join(f'<p class="note">{shown(note)}</p>' for note in table.notes)
    # a table that scrolls must be reached by the keyboard
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{shown(table.title)}"><table class="figures">'
        f"<caption>{shown(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{notes}"
    )


def _plots(run: Told) -> str:
    """Quality against time to the first token and against what was charged, by score and by distance."""
    kind = "measured" if run.summary.measured else "single readings"
    drawn = "".join(
        f"<figure>{scatter(points, f'{across}, {kind}' if across == _FIRST else across, up, up == _KL)}</figure>"
        for up in (_KL, run.score)
        for across in (_FIRST, _CHARGED)
        if (points := list(_points(run, across, up)))
    )
    legend = "".join(f'<li class="{_kind(arm)}"><span>{shown(arm)}</span></li>' for arm in run.arms)
    return f'<div class="plots">{drawn}</div><p class="note">Points by number:</p><ol class="legend">{legend}</ol>'


_KL, _FIRST, _CHARGED = "KL to full prefill", "time to first token (full prefill = 1)", "charged budget (share)"


def _points(run: Told, across: str, up: str) -> Iterator[Point]:
    for n, arm in enumerate(run.summary.arms, start=1):
        value, charged = _value(arm, up), None if arm.work is None else arm.work.charged
        x = run.summary.first_token(arm) if across == _FIRST else charged
        if value is None or x is None:
            continue
        label = f"{arm.method}: {up} {value.value:.3f} [{value.low:.3f}, {value.high:.3f}], {across} {x:.3f}"
        yield Point(str(n), label, x, value.value, value.low, value.high, _kind(arm.method))


def _value(arm: ArmSummary, up: str) -> Interval | None:
    if up == _KL:
        return None if arm.fidelity is None else arm.fidelity.kl
    return None if arm.scored is None else arm.scored.score


def _kind(arm: str) -> str:
    return "method" if find_arm(arm).is_method and not is_random(arm) else "control"
