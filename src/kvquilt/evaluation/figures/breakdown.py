"""Scores and damage of parts of a run: by kind of question, and group by group where these are few."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from kvquilt.evaluation.figures.damage import damage_base
from kvquilt.evaluation.figures.run_lines import RunLines, right, scores
from kvquilt.evaluation.figures.summary import Part, PartScore
from kvquilt.evaluation.run.arms import FULL, WITHOUT
from kvquilt.evaluation.run.folder import Line

MANY_GROUPS = 10  # from as many on an interval stands for them


def by_kind(lines: RunLines, kinds: Mapping[str, str]) -> tuple[Part, ...]:
    """Nothing where all items are of one kind.

    Args:
        kinds: by item; one that has none counts to those of no kind.
    """
    return _parts(lines, {item: kinds.get(item) or "no kind" for item in lines.arms[FULL]})


def by_group(lines: RunLines) -> tuple[Part, ...]:
    """Nothing where there is one group, or so many that an interval says more."""
    parts = {item: line["group"] for item, line in lines.arms[FULL].items()}
    return _parts(lines, parts) if len(set(parts.values())) < MANY_GROUPS else ()


def _parts(lines: RunLines, names: Mapping[str, str]) -> tuple[Part, ...]:
    made = []
    for name in sorted(set(names.values())):
        items = [item for item in lines.arms[FULL] if names[item] == name]
        found = {arm: _score(lines, [each[item] for item in items]) for arm, each in lines.arms.items()}
        made.append(Part(name, len(items), {arm: score for arm, score in found.items() if score is not None}))
    return tuple(made) if len(made) > 1 else ()


def _score(lines: RunLines, some: Sequence[Line]) -> PartScore | None:
    mine = [line for line in some if line["refused"] is None]
    if not mine or mine[0]["score"] is None:
        return None
    full, without = lines.same(FULL, mine), lines.answering(WITHOUT, mine)
    base = None if full is None or without is None else damage_base(right(full), right(without))
    several = len({line["group"] for line in mine}) > 1
    return PartScore(
        items=len(mine),
        score=statistics.fmean(line["score"] for line in mine),
        around=lines.bootstrap(mine).level(scores(mine)) if several else None,
        base=None if base is None else sum(base),
        lost=None if base is None else sum(d and not r for d, r in zip(base, right(mine), strict=True)),
    )
