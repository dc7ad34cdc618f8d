"""Methods against the controls that say what they are worth: less context, chance, documents that cannot help."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvquilt.evaluation.figures.random_draws import is_random, on_items, pooled_kl, pooled_scores
from kvquilt.evaluation.figures.run_lines import RunLines, mean_kl, scores
from kvquilt.evaluation.figures.statistics import Statistic, outcome
from kvquilt.evaluation.figures.summary import Against, ArmSummary, Draws, Work
from kvquilt.evaluation.run.arms import FEWER, find_arm
from kvquilt.evaluation.run.folder import Line
from kvquilt.repair.nothing import Nothing


@dataclass(frozen=True, eq=False, slots=True)
class Comparing:
    """`arms`: of the run, by name; `draws`: its random rows."""

    lines: RunLines
    arms: Mapping[str, ArmSummary]
    draws: Sequence[Draws]

    def compared(self, arm: ArmSummary) -> ArmSummary:
        """The same, held against what the run has of controls; controls themselves are not."""
        if not arm.items or not find_arm(arm.method).is_method or is_random(arm.method):
            return arm
        near, own = self._near(arm), self._deranged(arm.method)
        scored, fidelity = arm.scored, arm.fidelity
        if scored is not None:
            fewer = self._fewer(arm)
            scored = replace(
                scored,
                fewer=None if fewer is None else self._scores(arm, fewer, [fewer]),
                random=None if near is None or near.score is None else self._scores(arm, near.name, near.arms),
                deranged=None if own is None else self._scores(arm, own, [own]),
            )
        if fidelity is not None:
            fidelity = replace(
                fidelity,
                random=None if near is None else self._kl(arm, near.name, near.arms),
                deranged=None if own is None else self._kl(arm, own, [own]),
            )
        return replace(arm, scored=scored, fidelity=fidelity)

    def _fewer(self, arm: ArmSummary) -> str | None:
        """Full prefill over fewer documents that takes most nearly as long, by measured times if all have some."""
        others = {name: other.work for name, other in self.arms.items() if name.startswith(FEWER) and other.scored}
        works = {name: work for name, work in others.items() if work is not None}
        if arm.work is None or not works:
            return None
        seconds = first_token_of([arm.work, *works.values()])
        mine, *theirs = [math.log(max(1e-9, seconds(work))) for work in (arm.work, *works.values())]
        return min(zip(theirs, works, strict=True), key=lambda each: abs(each[0] - mine))[1]

    def _near(self, arm: ArmSummary) -> Draws | None:
        """Of the draws over the same compiled segments, those that are charged most nearly as much."""
        method = find_arm(arm.method).method
        same = [each for each in self.draws if find_arm(each.arms[0]).method.writer == method.writer]
        if isinstance(method.selector, Nothing) or arm.work is None or not same:
            return None
        charged = arm.work.charged
        return min(same, key=lambda each: abs(each.charged - charged))

    def _deranged(self, method: str) -> str | None:
        named = {name: find_arm(name) for name in self.arms}
        return next((name for name, arm in named.items() if arm.deranged and arm.method.name == method), None)

    def _scores(self, arm: ArmSummary, name: str, others: Sequence[str]) -> Against | None:
        mine = self.lines.ran(arm.method)
        draws = on_items(self.lines, others, mine)
        if draws is None or any(each[0]["score"] is None for each in draws):
            return None
        return self._against(name, mine, scores(mine), pooled_scores(draws), higher_is_better=True)

    def _kl(self, arm: ArmSummary, name: str, others: Sequence[str]) -> Against | None:
        mine = self.lines.ran(arm.method)
        draws = on_items(self.lines, others, mine)
        return None if draws is None else self._against(name, mine, mean_kl(mine), pooled_kl(draws), False)

    def _against(
        self, name: str, mine: Sequence[Line], value: Statistic, other: Statistic, higher_is_better: bool
    ) -> Against:
        difference = self.lines.bootstrap(mine).difference(value, other)
        return Against(name, difference, outcome(difference, higher_is_better))


def first_token_of(works: Sequence[Work]) -> Callable[[Work], float]:
    """How to read the times of these, in full prefill's own: as measured if all of them are, else single readings."""
    if all(work.timed is not None for work in works):
        return lambda work: work.first_token if work.timed is None else work.timed.ratio
    return lambda work: work.first_token
