"""What a summary says of methods in sentences, for those who do not read the tables to the end."""

from __future__ import annotations

from kvquilt.evaluation.figures.comparing import first_token_of
from kvquilt.evaluation.figures.statistics import Outcome
from kvquilt.evaluation.figures.summary import ArmSummary, Summary
from kvquilt.evaluation.figures.table import interval

_TOLD = {Outcome.WIN: "beats", Outcome.TIE: "is not told from", Outcome.LOSS: "is beaten by"}
_AS_LONG = 1.25  # times, up to which two arms take about as long


def sentences(summary: Summary) -> list[str]:
    """Methods against full prefill over fewer documents; those that do no better with the right documents than with
    others; what was not measured."""
    of_arms = [each for arm in summary.arms for each in (_against_fewer(summary, arm), *_deranged(arm)) if each]
    return of_arms + [f"Not measured: {name}: {reason}." for name, reason in summary.refused.items()]


def _against_fewer(summary: Summary, arm: ArmSummary) -> str:
    if arm.scored is None or arm.scored.fewer is None:
        return ""
    fewer = arm.scored.fewer
    other = next(each for each in summary.arms if each.method == fewer.arm)
    works = [each.work for each in (arm, other) if each.work is not None]
    seconds = first_token_of(works)
    mine, theirs = map(seconds, works)
    near = max(mine, theirs) <= _AS_LONG * min(mine, theirs)
    takes = "about as long" if near else "longer" if theirs > mine else "less long"
    kind = "measured" if all(work.timed is not None for work in works) else "single readings"
    return (
        f"{arm.method} {_TOLD[fewer.outcome]} {fewer.arm}, which takes {takes} to the first token ({theirs:.3f} of "
        f"full prefill's time against {mine:.3f}, {kind}): score {interval(fewer.difference, signed=True)}."
    )


def _deranged(arm: ArmSummary) -> list[str]:
    said = []
    score = None if arm.scored is None else arm.scored.deranged
    if score is not None and score.outcome is not Outcome.WIN:
        said.append(
            f"{arm.method} scores no better than over the documents of other questions ({score.arm}): "
            f"{interval(score.difference, signed=True)}. Nothing says that its score comes from its documents."
        )
    kl = None if arm.fidelity is None else arm.fidelity.deranged
    if kl is not None and kl.outcome is not Outcome.WIN:
        said.append(
            f"{arm.method} is no nearer to full prefill than over the documents of other questions ({kl.arm}): KL "
            f"{interval(kl.difference, signed=True)}."
        )
    return said
