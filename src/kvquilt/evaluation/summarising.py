"""From the lines of a run to its summary. Nothing is computed anew."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvquilt.errors import InputError
from kvquilt.evaluation.answer_fidelity import Divergence, divergence, kl_recovery, nll_gap
from kvquilt.evaluation.arms import FEWER, FULL, WITHOUT, find_arm
from kvquilt.evaluation.damage import damage_intervals, damage_of
from kvquilt.evaluation.metrics import Counts, f1_recovery, micro_f1_bag
from kvquilt.evaluation.run import Finished
from kvquilt.evaluation.run_folder import Line
from kvquilt.evaluation.significance import discordant, holm, mcnemar, wilcoxon
from kvquilt.evaluation.statistics import Bootstrap, Interval, Statistic, mean_of, micro_f1_of, outcome, share_of
from kvquilt.evaluation.summary import ArmSummary, Fewer, Fidelity, Scored, Summary, Work
from kvquilt.ledger import Ledger

_NONE = "none"


def summarise(finished: Finished, seed: int = 0, resamples: int = 10_000) -> Summary:
    """The summary of a run that is finished.

    Args:
        seed, resamples: of the intervals.

    Raises:
        InputError: no lines, or items that lack an arm.
    """
    arms: dict[str, dict[str, Line]] = {}
    for line in finished.lines:
        arms.setdefault(line["method"], {})[line["item"]] = line
    full = arms.get(FULL, {})
    if not full or any(lines.keys() != full.keys() for lines in arms.values()):
        raise InputError("lines", "must be those of a finished run, all arms on all items")
    made = _Lines(arms, seed, resamples)
    found = [made.arm(name) for name in arms]
    # the families are the run's methods, named before anything was measured: against full prefill, and against reuse
    methods = [arm for arm in found if find_arm(arm.method).is_method]
    scores = holm({a.method: a.scored.p for a in methods if a.scored and a.scored.p is not None})
    distances = holm({a.method: a.fidelity.p for a in methods if a.fidelity and a.fidelity.p is not None})
    return Summary(
        items=len(full),
        groups=len({line["group"] for line in full.values()}),
        documents_help=made.documents_help(),
        arms=tuple(made.against_fewer(_adjusted(arm, scores, distances), found) for arm in found),
        refused=dict(finished.refused),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Lines:
    """Lines by arm and item."""

    arms: Mapping[str, Mapping[str, Line]]
    seed: int
    resamples: int
    _draws: dict[tuple[str, ...], Bootstrap] = field(default_factory=dict, repr=False)

    def documents_help(self) -> Interval | None:
        full = list(self.arms[FULL].values())
        without = self._answering(WITHOUT, full)
        return None if without is None else self._bootstrap(full).difference(_scores(full), _scores(without))

    def arm(self, name: str) -> ArmSummary:
        lines = [line for line in self.arms[name].values() if line["refused"] is None]
        refused = len(self.arms[name]) - len(lines)
        if not lines:
            return ArmSummary(name, 0, refused)
        full = [self.arms[FULL][line["item"]] for line in lines]
        return ArmSummary(
            method=name,
            items=len(lines),
            refused=refused,
            fidelity=None if name == FULL else self._fidelity(name, lines, full),
            scored=None if lines[0]["score"] is None else self._scored(lines, full),
            work=_work(lines, full),
        )

    def _fidelity(self, name: str, lines: Sequence[Line], full: Sequence[Line]) -> Fidelity:
        none = self._same(_NONE, lines)
        return Fidelity(
            first=_divergence(lines, "self", head=1),
            own=_divergence(lines, "self"),
            gold=_divergence(lines, "gold"),
            kl=self._bootstrap(lines).level(_mean_kl(lines)),
            kl_recovery=None if none is None else kl_recovery(_rows(lines, "self", "kl"), _rows(none, "self", "kl")),
            p=None if none is None or name == _NONE else wilcoxon(_group_means(lines), _group_means(none)),
            nll_gap=nll_gap(_rows(lines, "gold", "nll"), _rows(full, "gold", "nll")),
        )

    def _scored(self, lines: Sequence[Line], full: Sequence[Line]) -> Scored:
        draws, right, reference = self._bootstrap(lines), _right(lines), _right(full)
        only_full, only_arm = discordant(reference, right)
        difference = draws.difference(_scores(lines), _scores(full))
        none = self._answering(_NONE, lines)
        compared = self._compared(lines, full)
        recovered = [micro_f1_bag(_counts(each)) for each in (lines, none or (), full) if each]
        return Scored(
            score=draws.level(_scores(lines)),
            difference=difference,
            outcome=outcome(difference),
            right=sum(right) / len(right),
            micro_f1=draws.level(micro_f1_of(_counts(lines))),
            f1_recovery=None if none is None else f1_recovery(*recovered),
            only_full=only_full,
            only_arm=only_arm,
            p=mcnemar(only_full, only_arm),
            damage=None if compared is None else damage_of(*compared),
            shares=None if compared is None else damage_intervals(draws, *compared),
        )

    def against_fewer(self, arm: ArmSummary, arms: Sequence[ArmSummary]) -> ArmSummary:
        """The same, held against the control that takes about as long."""
        others = {other.method: other.work for other in arms if other.method.startswith(FEWER) and other.scored}
        seconds = {name: math.log(max(1e-9, work.first_token)) for name, work in others.items() if work is not None}
        if arm.scored is None or arm.work is None or not seconds or not find_arm(arm.method).is_method:
            return arm
        mine = math.log(max(1e-9, arm.work.first_token))
        name = min(seconds, key=lambda other: abs(seconds[other] - mine))
        lines = [line for line in self.arms[arm.method].values() if line["refused"] is None]
        if (other := self._answering(name, lines)) is None:
            return arm
        difference = self._bootstrap(lines).difference(_scores(lines), _scores(other))
        return replace(arm, scored=replace(arm.scored, fewer=Fewer(name, difference, outcome(difference))))

    def _compared(self, lines: Sequence[Line], full: Sequence[Line]) -> tuple[list[bool], ...] | None:
        """Right or wrong under the arm, full prefill, no context and pure reuse; None where one of them is missing."""
        without, none = self._answering(WITHOUT, lines), self._answering(_NONE, lines)
        if none is None or without is None:
            return None
        return _right(lines), _right(full), _right(without), _right(none)

    def _same(self, name: str, lines: Sequence[Line]) -> list[Line] | None:
        """Another arm's lines on the same items; None where it is not there, or could not run on one of them."""
        if name not in self.arms:
            return None
        other = [self.arms[name][line["item"]] for line in lines]
        return None if any(line["refused"] is not None for line in other) else other

    def _answering(self, name: str, lines: Sequence[Line]) -> list[Line] | None:
        """The same of an arm that gives answers."""
        other = self._same(name, lines)
        return None if other is None or other[0]["score"] is None else other

    def _bootstrap(self, lines: Sequence[Line]) -> Bootstrap:
        groups = tuple(line["group"] for line in lines)
        if groups not in self._draws:
            self._draws[groups] = Bootstrap(groups, self.seed, self.resamples)
        return self._draws[groups]


def _adjusted(arm: ArmSummary, scores: Mapping[str, float], distances: Mapping[str, float]) -> ArmSummary:
    scored, fidelity = arm.scored, arm.fidelity
    return replace(
        arm,
        scored=None if scored is None else replace(scored, p=scores.get(arm.method)),
        fidelity=None if fidelity is None else replace(fidelity, p=distances.get(arm.method)),
    )


def _work(lines: Sequence[Line], full: Sequence[Line]) -> Work:
    ledgers = [Ledger.from_dict({**line["ledger"], "seconds": {}}) for line in lines]
    seconds = [
        line["seconds"]["first_token"] / max(1e-9, reference["seconds"]["first_token"])
        for line, reference in zip(lines, full, strict=True)
    ]
    return Work(
        reused=statistics.fmean(each.reused_share for each in ledgers),
        charged=statistics.fmean(each.spending.charged_share if each.spending else 0.0 for each in ledgers),
        flops=statistics.fmean(
            each.flops / reference["ledger"]["flops"] for each, reference in zip(ledgers, full, strict=True)
        ),
        first_token=statistics.median(seconds),
        fallbacks=dict(Counter(str(fallback.reason) for each in ledgers for fallback in each.fallbacks)),
    )


def _rows(lines: Sequence[Line], rows: str, what: str) -> list[float]:
    return [value for line in lines for value in line["fidelity"][rows][what]]


def _divergence(lines: Sequence[Line], rows: str, head: int | None = None) -> Divergence:
    kept = [line["fidelity"][rows] for line in lines]
    kl, agree = ([value for each in kept for value in each[what][:head]] for what in ("kl", "agree"))
    return divergence(kl, agree)


def _group_means(lines: Sequence[Line]) -> list[float]:
    """Mean KL of own rows of every group."""
    groups: dict[str, list[float]] = {}
    for line in lines:
        groups.setdefault(line["group"], []).extend(line["fidelity"]["self"]["kl"])
    return [statistics.fmean(rows) for rows in groups.values()]


def _right(lines: Sequence[Line]) -> list[bool]:
    return [bool(line["right"]) for line in lines]


def _scores(lines: Sequence[Line]) -> Statistic:
    return mean_of([line["score"] for line in lines])


def _mean_kl(lines: Sequence[Line]) -> Statistic:
    """Over rows, so that items count by the length of full prefill's answer."""
    kept = [line["fidelity"]["self"]["kl"] for line in lines]
    return share_of([sum(rows) for rows in kept], [len(rows) for rows in kept])


def _counts(lines: Sequence[Line]) -> list[Counts]:
    return [Counts(*line["scores"]["micro_f1_bag"]) for line in lines]
