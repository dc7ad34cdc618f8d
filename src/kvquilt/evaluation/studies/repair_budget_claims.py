"""Two arms of a setting held against each other, and what that says over all settings of a study."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kvquilt.evaluation.figures.damage import LEAST_BASE
from kvquilt.evaluation.figures.significance import holm, mcnemar, wilcoxon
from kvquilt.evaluation.run.arms import FULL, WITHOUT
from kvquilt.evaluation.run.folder import by_item
from kvquilt.evaluation.studies.repair_budget_folders import Measured


def claim(each: Measured, name: str, one: str, other: str) -> dict[str, Any]:
    """One arm against another on the questions of D, and by KL on groups' means, where both could run.

    ``p`` and ``kl_p`` are adjusted by `adjust` for all settings of the claim.
    """
    both = by_item(each.lines).values()
    pairs = [arms for arms in both if arms[one]["refused"] is None and arms[other]["refused"] is None]
    base = [arms for arms in pairs if arms[FULL]["right"] and not arms[WITHOUT]["right"]]
    only_one = sum(bool(arms[one]["right"]) and not arms[other]["right"] for arms in base)
    only_other = sum(bool(arms[other]["right"]) and not arms[one]["right"] for arms in base)
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for arms in pairs:
        mine, theirs = groups.setdefault(arms[one]["group"], ([], []))
        mine += arms[one]["fidelity"]["self"]["kl"]
        theirs += arms[other]["fidelity"]["self"]["kl"]
    means = [[statistics.fmean(side) for side in sides] for sides in zip(*groups.values(), strict=True)]
    return {
        "claim": name, "arm": one, "against": other, "items": len(pairs), "base": len(base),
        "only_arm": only_one, "only_against": only_other, "enough": len(base) >= LEAST_BASE,
        "p": mcnemar(only_one, only_other),
        "kl_difference": statistics.fmean(means[0]) - statistics.fmean(means[1]) if means else None,
        "kl_p": wilcoxon(*means) if means else None,
    }  # fmt: skip


def adjust(claims: Sequence[dict[str, Any]]) -> None:
    """Holm's adjustment in each family: one claim over all settings."""
    for name in {each["claim"] for each in claims}:
        family = [each for each in claims if each["claim"] == name]
        for p in ("p", "kl_p"):
            known = {str(n): each[p] for n, each in enumerate(family) if each[p] is not None}
            for n, value in holm(known).items():
                family[int(n)][p] = value
