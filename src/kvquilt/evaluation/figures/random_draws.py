"""Random rows as one control: several seeds together, which is what a selector is held against."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from kvquilt.evaluation.figures.run_lines import RunLines, mean_kl
from kvquilt.evaluation.figures.statistics import Statistic, mean_of, share_of
from kvquilt.evaluation.figures.summary import ArmSummary, Draws
from kvquilt.evaluation.run.arms import find_arm
from kvquilt.evaluation.run.folder import Line
from kvquilt.repair.presets import Method
from kvquilt.repair.random_rows import Random
from kvquilt.repair.written import split

LEAST_DRAWS = 5  # fewer say little of what chance does


def is_random(arm: str) -> bool:
    """Whether its rows are drawn, which makes it a control."""
    found = find_arm(arm)
    return found.is_method and isinstance(found.method.selector, Random)


def pools(arms: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Arms that differ in their seed alone, two or more, by how they are written without it. No seed counts twice."""
    found: dict[Method, dict[int, str]] = {}
    for arm in filter(is_random, arms):
        method = find_arm(arm).method
        selector = method.selector
        assert isinstance(selector, Random)
        same = dataclasses.replace(method, name="", selector=dataclasses.replace(selector, seed=0))
        found.setdefault(same, {}).setdefault(selector.seed, arm)
    return {_seedless(next(iter(draws.values()))): tuple(draws.values()) for draws in found.values() if len(draws) > 1}


def drawn(lines: RunLines, name: str, arms: Sequence[str], found: Sequence[ArmSummary]) -> Draws | None:
    """The control that `arms` are together; None where there is no item that all of them could run on."""
    items = [line for line in lines.ran(arms[0]) if all(lines.same(arm, [line]) for arm in arms)]
    draws = on_items(lines, arms, items)
    if not items or draws is None:
        return None
    bootstrap = lines.bootstrap(items)
    kl = [bootstrap.level(mean_kl(each)).value for each in draws]
    answer = all(line["score"] is not None for each in draws for line in each)
    own = [statistics.fmean(line["score"] for line in each) for each in draws] if answer else []
    return Draws(
        name=name,
        arms=tuple(arms),
        items=len(items),
        charged=statistics.fmean(arm.work.charged for arm in found if arm.method in arms and arm.work is not None),
        kl=bootstrap.level(pooled_kl(draws)),
        kl_range=(min(kl), max(kl)),
        score=bootstrap.level(pooled_scores(draws)) if answer else None,
        score_range=(min(own), max(own)) if answer else None,
    )


def on_items(lines: RunLines, arms: Sequence[str], like: Sequence[Line]) -> list[list[Line]] | None:
    """Lines of every draw on the same items; None where one could not run on one of them."""
    draws = [each for arm in arms if (each := lines.same(arm, like)) is not None]
    return draws if len(draws) == len(arms) else None


def pooled_scores(draws: Sequence[Sequence[Line]]) -> Statistic:
    """Of the mean over draws on every item."""
    return mean_of([statistics.fmean(line["score"] for line in each) for each in zip(*draws, strict=True)])


def pooled_kl(draws: Sequence[Sequence[Line]]) -> Statistic:
    rows = [[line["fidelity"]["self"]["kl"] for line in each] for each in zip(*draws, strict=True)]
    return share_of([statistics.fmean(map(sum, each)) for each in rows], [len(each[0]) for each in rows])


def _seedless(written: str) -> str:
    name, options = split(written)
    kept = [option for option in options if option.partition("=")[0].strip() != "seed"]
    return f"{name}:{','.join(kept)}" if kept else name
