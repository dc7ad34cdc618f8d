"""Summaries of hand-made lines."""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.figures.damage import Damage
from kvquilt.evaluation.figures.statistics import Interval, Outcome
from kvquilt.evaluation.figures.summarising import summarise
from kvquilt.evaluation.figures.summary import ArmSummary, Summary
from kvquilt.evaluation.run.run import Finished
from kvquilt.ledger import Ledger, Provenance, Spending

# of six items in three groups: who is right
RIGHT = {
    "full": [1, 1, 1, 1, 1, 0],
    "no-context": [0, 0, 0, 0, 1, 0],
    "none": [1, 0, 0, 0, 1, 0],
    "epic:k=2": [0, 1, 1, 0, 1, 1],
}
KL = {"no-context": 4.0, "none": 2.0, "epic:k=2": 0.5}


def line(arm: str, n: int, **changes: Any) -> dict[str, Any]:
    right = RIGHT[arm][n]
    # without documents the prompt is short, and full prefill of it is, too
    flops = {"full": 120.0, "no-context": 30.0, "none": 30.0, "epic:k=2": 60.0}[arm]
    ledger = Ledger(method=arm, flops=flops, flops_full=30.0 if arm == "no-context" else 120.0)
    ledger.tokens[Provenance.REUSED] = 75 if arm in ("none", "epic:k=2") else 0
    ledger.tokens[Provenance.INLINE] = 25
    if arm == "epic:k=2":
        ledger.spending = Spending(100, 3, None, 10, 0, 30)
        if n == 2:
            ledger.fall_back("not_prepared", "a document")
    account = ledger.as_dict()
    del account["seconds"]
    fidelity: dict[str, Any] = {"gold": {"nll": [1.0, 2.0]}}
    if arm != "full":
        kl = KL[arm]
        fidelity = {
            # the first row of the first item is ten times as far
            "self": {"kl": [kl * (10 if n == 0 else 1), kl], "agree": [0.0, 1.0]},
            "gold": {"kl": [kl, kl], "agree": [1.0, 1.0], "nll": [1.0 + kl, 2.0]},
        }
    return {
        "item": f"item-{n}", "group": f"group-{n // 2}", "method": arm, "refused": None, "answer": "x",
        "score": float(right), "right": bool(right), "scores": {"micro_f1_bag": [right, 1 - right, 1 - right]},
        "fidelity": fidelity, "ledger": account, "seconds": {"first_token": 1.0 if arm == "full" else 0.25},
    } | changes  # fmt: skip


def finished(**changes: Any) -> Finished:
    """Lines of all items and arms; `changes` are by arm."""
    lines = [line(arm, n, **changes.get(arm.partition(":")[0], {})) for n in range(6) for arm in RIGHT]
    return Finished(tuple(lines), {"cacheblend": "it must equal full prefill"})


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise(finished(), resamples=2000)


def of(summary: Summary, method: str) -> ArmSummary:
    return next(arm for arm in summary.arms if arm.method == method)


def test_a_run_as_a_whole(summary: Summary) -> None:
    assert (summary.items, summary.groups) == (6, 3)
    assert [arm.method for arm in summary.arms] == list(RIGHT)
    assert summary.refused == {"cacheblend": "it must equal full prefill"}
    # by group: 2 of 2, 2 of 2, 0 of 2 gained; all draws of the last one have 1/27
    assert summary.documents_help == Interval(pytest.approx(4 / 6), 0.0, 1.0)


def test_fidelity_of_an_arm(summary: Summary) -> None:
    found = of(summary, "epic:k=2").fidelity
    assert found is not None
    assert (found.first.rows, found.own.rows, found.gold.rows) == (6, 12, 12)
    assert found.first.mean == pytest.approx((5.0 + 5 * 0.5) / 6)
    assert found.own.mean == pytest.approx((5.0 + 11 * 0.5) / 12)
    assert (found.own.max, found.own.top1, found.first.top1, found.gold.top1) == (5.0, 0.5, 0.0, 1.0)
    # by group 5 + 3 * 0.5, 4 * 0.5, 4 * 0.5 over 4 rows each: the widest draws are of the first alone and without it
    assert found.kl == Interval(pytest.approx(found.own.mean), 0.5, pytest.approx(6.5 / 4))
    assert found.kl_recovery == pytest.approx(0.75)
    assert found.nll_gap == pytest.approx(0.25)
    # three groups, all nearer than pure reuse: 2 / 2^3
    assert found.p == pytest.approx(0.25)
    assert of(summary, "full").fidelity is None
    reuse, without = of(summary, "none").fidelity, of(summary, "no-context").fidelity
    assert reuse is not None
    assert without is not None
    assert (reuse.kl_recovery, reuse.p) == (0.0, None)
    assert (without.kl_recovery, without.p) == (pytest.approx(-1.0), None)


def test_scores_of_an_arm(summary: Summary) -> None:
    found = of(summary, "epic:k=2").scored
    assert found is not None
    assert (found.score.value, found.right) == (pytest.approx(4 / 6), pytest.approx(4 / 6))
    # groups against full prefill: -1/2, -1/2, +1/2
    assert found.difference == Interval(pytest.approx(-1 / 6), -0.5, 0.5)
    assert found.outcome is Outcome.TIE
    assert found.micro_f1.value == pytest.approx(4 / 6)
    assert found.f1_recovery == pytest.approx((4 / 6 - 2 / 6) / (5 / 6 - 2 / 6))
    assert (found.only_full, found.only_arm) == (2, 1)
    # D are items 0 to 3; of them reuse has item 0 right: it is lost; two of three are regained
    assert found.damage == Damage(4, 0.5, pytest.approx(2 / 3), 1.0, 1, pytest.approx(4 / 6))
    assert found.shares is not None
    # half of D is lost in both groups that have any; eight draws in 27 miss the group that reuse has right
    assert found.shares.damage == Interval(0.5, 0.5, 0.5)
    assert found.shares.collateral is None
    reuse = of(summary, "none").scored
    assert reuse is not None
    assert reuse.damage == Damage(4, 0.75, 0.0, 0.0, 0, pytest.approx(2 / 6))
    assert (reuse.only_full, reuse.only_arm) == (3, 0)


def test_p_is_adjusted_for_the_methods_and_controls_have_none(summary: Summary) -> None:
    # 3:0 is 2/8, 2:1 is 1: two methods, so the smaller doubles
    found = {arm.method: arm.scored.p for arm in summary.arms if arm.scored is not None}
    assert found == {"full": None, "no-context": None, "none": 0.5, "epic:k=2": 1.0}


def test_work_of_an_arm(summary: Summary) -> None:
    found = of(summary, "epic:k=2").work
    assert found is not None
    assert (found.reused, found.charged, found.flops, found.first_token) == (0.75, pytest.approx(0.1), 0.5, 0.25)
    assert found.fallbacks == {"not_prepared": 1}
    short = of(summary, "no-context").work
    assert short is not None
    assert (short.reused, short.flops) == (0.0, 0.25)


def test_an_arm_is_compared_on_the_items_that_it_could_run_on() -> None:
    lines = list(finished().lines)
    for n in (3, 7, 23):  # epic on items 0, 1 and 5
        lines[n] = lines[n] | {
            "refused": "its probe", "score": None, "right": None, "scores": None, "fidelity": None, "ledger": None
        }  # fmt: skip
    found = of(summarise(Finished(tuple(lines), {}), resamples=500), "epic:k=2")
    assert (found.items, found.refused) == (3, 3)
    assert found.scored is not None
    assert (found.scored.score.value, found.scored.difference.value) == (pytest.approx(2 / 3), pytest.approx(-1 / 3))
    assert found.fidelity is not None
    assert found.fidelity.own.mean == 0.5
    everywhere = [each | {"refused": "its probe"} if each["method"] == "epic:k=2" else each for each in lines]
    assert of(summarise(Finished(tuple(everywhere), {}), resamples=500), "epic:k=2") == ArmSummary("epic:k=2", 0, 6)


def test_silent_arms_have_no_scores_and_no_damage_is_told_without_reuse() -> None:
    silent = {"score": None, "right": None, "scores": None, "answer": None}
    found = summarise(finished(none=silent), resamples=500)
    assert of(found, "none").scored is None
    assert of(found, "none").fidelity is not None
    other = of(found, "epic:k=2").scored
    assert other is not None
    assert (other.damage, other.f1_recovery) == (None, None)
    assert summarise(finished(**{"no-context": silent}), resamples=500).documents_help is None


def test_a_method_is_held_against_the_fewer_documents_that_take_as_long() -> None:
    lines = list(finished().lines)
    for name, seconds, right in (("fewer-documents:1", 0.05, 0), ("fewer-documents:2", 0.3, 1)):
        lines += [
            line("full", n, method=name, score=float(right), right=bool(right), seconds={"first_token": seconds})
            | {"fidelity": line("none", n)["fidelity"]}
            for n in range(6)
        ]
    summary = summarise(Finished(tuple(lines), {}), resamples=500)
    found = of(summary, "epic:k=2").scored
    assert found is not None
    assert found.fewer is not None
    assert (found.fewer.arm, found.fewer.difference.value) == ("fewer-documents:2", pytest.approx(4 / 6 - 1))
    for control in ("full", "fewer-documents:1"):
        other = of(summary, control).scored
        assert other is not None
        assert other.fewer is None


def test_runs_that_are_not_finished_are_refused() -> None:
    with pytest.raises(InputError, match="finished"):
        summarise(Finished(finished().lines[:-1], {}))
    with pytest.raises(InputError, match="finished"):
        summarise(Finished((), {}))
