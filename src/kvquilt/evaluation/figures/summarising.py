"""From the lines of a run to its summary. Nothing is computed anew."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvquilt.evaluation.figures.answer_fidelity import Divergence, divergence, kl_recovery, nll_gap
from kvquilt.evaluation.figures.breakdown import by_group, by_kind
from kvquilt.evaluation.figures.comparing import Comparing
from kvquilt.evaluation.figures.damage import damage_intervals, damage_of
from kvquilt.evaluation.figures.random_draws import drawn, is_random, pools
from kvquilt.evaluation.figures.run_lines import RunLines, mean_kl, right, scores
from kvquilt.evaluation.figures.significance import discordant, holm, mcnemar, wilcoxon
from kvquilt.evaluation.figures.statistics import Interval, micro_f1_of, outcome
from kvquilt.evaluation.figures.summary import ArmSummary, Fidelity, Scored, Summary, Timed, Work
from kvquilt.evaluation.run.arms import FULL, WITHOUT, find_arm
from kvquilt.evaluation.run.folder import Line
from kvquilt.evaluation.run.run import Finished
from kvquilt.evaluation.run.timed_prompt import TimedPrompt
from kvquilt.evaluation.run.timing import PREFIX_HIT, break_even
from kvquilt.evaluation.tasks.metrics import Counts, f1_recovery, micro_f1_bag
from kvquilt.ledger import Ledger

_NONE = "none"


def summarise(
    finished: Finished,
    seed: int = 0,
    resamples: int = 10_000,
    *,
    timing: Sequence[TimedPrompt] = (),
    kinds: Mapping[str, str] | None = None,
) -> Summary:
    """The summary of a run that is finished.

    Args:
        seed, resamples: of the intervals.
        timing: what was timed of it (see `read_timing`).
        kinds: of its items by id.

    Raises:
        InputError: no lines, or items that lack an arm.
    """
    lines = RunLines.of(finished.lines, seed, resamples)
    made = _Made(lines, timing)
    found = [made.arm(name) for name in lines.arms]
    # the families are the run's methods, named before anything was measured: against full prefill, and against reuse
    methods = [arm for arm in found if find_arm(arm.method).is_method and not is_random(arm.method)]
    answers = holm({a.method: a.scored.p for a in methods if a.scored and a.scored.p is not None})
    distances = holm({a.method: a.fidelity.p for a in methods if a.fidelity and a.fidelity.p is not None})
    pooled = [drawn(lines, name, arms, found) for name, arms in pools(lines.arms).items()]
    random = tuple(each for each in pooled if each is not None)
    comparing = Comparing(lines, {arm.method: arm for arm in found}, random)
    full = lines.arms[FULL]
    return Summary(
        items=len(full),
        groups=len({line["group"] for line in full.values()}),
        documents_help=made.documents_help(),
        arms=tuple(comparing.compared(_adjusted(arm, answers, distances)) for arm in found),
        refused=dict(finished.refused),
        prefix_hit=_timed(PREFIX_HIT, timing),
        random=random,
        by_kind=by_kind(lines, kinds or {}),
        by_group=by_group(lines),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Made:
    """Summaries of arms, each by itself."""

    lines: RunLines
    timing: Sequence[TimedPrompt]

    def documents_help(self) -> Interval | None:
        full = self.lines.ran(FULL)
        without = self.lines.answering(WITHOUT, full)
        return None if without is None else self.lines.bootstrap(full).difference(scores(full), scores(without))

    def arm(self, name: str) -> ArmSummary:
        lines = self.lines.ran(name)
        refused = len(self.lines.arms[name]) - len(lines)
        if not lines:
            return ArmSummary(name, 0, refused)
        full = [self.lines.arms[FULL][line["item"]] for line in lines]
        return ArmSummary(
            method=name,
            items=len(lines),
            refused=refused,
            fidelity=None if name == FULL else self._fidelity(name, lines, full),
            scored=None if lines[0]["score"] is None else self._scored(lines, full),
            work=replace(_work(lines, full), timed=_timed(name, self.timing)) if find_arm(name).has_a_cost else None,
        )

    def _fidelity(self, name: str, lines: Sequence[Line], full: Sequence[Line]) -> Fidelity:
        none = self.lines.same(_NONE, lines)
        return Fidelity(
            first=_divergence(lines, "self", head=1),
            own=_divergence(lines, "self"),
            gold=_divergence(lines, "gold"),
            kl=self.lines.bootstrap(lines).level(mean_kl(lines)),
            kl_recovery=None if none is None else kl_recovery(_rows(lines, "self", "kl"), _rows(none, "self", "kl")),
            p=None if none is None or name == _NONE else wilcoxon(_group_means(lines), _group_means(none)),
            nll_gap=nll_gap(_rows(lines, "gold", "nll"), _rows(full, "gold", "nll")),
        )

    def _scored(self, lines: Sequence[Line], full: Sequence[Line]) -> Scored:
        draws, mine, reference = self.lines.bootstrap(lines), right(lines), right(full)
        only_full, only_arm = discordant(reference, mine)
        difference = draws.difference(scores(lines), scores(full))
        none = self.lines.answering(_NONE, lines)
        compared = self._compared(lines, full)
        recovered = [micro_f1_bag(_counts(each)) for each in (lines, none or (), full) if each]
        return Scored(
            score=draws.level(scores(lines)),
            difference=difference,
            outcome=outcome(difference),
            right=sum(mine) / len(mine),
            micro_f1=draws.level(micro_f1_of(_counts(lines))),
            f1_recovery=None if none is None else f1_recovery(*recovered),
            only_full=only_full,
            only_arm=only_arm,
            p=mcnemar(only_full, only_arm),
            damage=None if compared is None else damage_of(*compared),
            shares=None if compared is None else damage_intervals(draws, *compared),
            unmarked=_unmarked(lines),
        )

    def _compared(self, lines: Sequence[Line], full: Sequence[Line]) -> tuple[list[bool], ...] | None:
        """Right or wrong under the arm, full prefill, no context and pure reuse; None where one of them is missing."""
        without, none = self.lines.answering(WITHOUT, lines), self.lines.answering(_NONE, lines)
        if none is None or without is None:
            return None
        return right(lines), right(full), right(without), right(none)


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


def _timed(name: str, timing: Sequence[TimedPrompt]) -> Timed | None:
    """One arm over the prompts that it was timed on, each round by itself in full prefill's own time."""
    prompts = [(each, each.arms[FULL], each.arms[name]) for each in timing if name in each.arms]
    if not prompts:
        return None
    wall = [a / max(1e-9, b) for _, full, mine in prompts for a, b in zip(mine.wall, full.wall, strict=True)]
    processor = [
        a / max(1e-9, b) for _, full, mine in prompts for a, b in zip(mine.processor, full.processor, strict=True)
    ]
    low, _, high = statistics.quantiles(wall, n=4, method="inclusive")
    compiling = [each.compile.get(name) for each, _, _ in prompts]
    paid = None
    if all(seconds is not None for seconds in compiling):
        saved = (sum(full.median for _, full, _ in prompts), sum(mine.median for _, _, mine in prompts))
        paid = break_even(sum(seconds for seconds in compiling if seconds is not None), *saved)
    return Timed(
        ratio=statistics.median(wall),
        low=low,
        high=high,
        processor=statistics.median(processor),
        seconds=statistics.median(seconds for _, _, mine in prompts for seconds in mine.wall),
        repeats=len(wall),
        prompts=len(prompts),
        break_even=paid,
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


def _counts(lines: Sequence[Line]) -> list[Counts]:
    return [Counts(*line["scores"]["micro_f1_bag"]) for line in lines]


def _unmarked(lines: Sequence[Line]) -> int | None:
    marked = [line["scores"].get("marked") for line in lines]
    return None if None in marked else marked.count(False)
