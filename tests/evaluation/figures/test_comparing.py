"""Methods against controls, and times to the first token, of hand-made lines."""

from __future__ import annotations

from typing import Any

import pytest

from kvquilt.evaluation.figures.sentences import sentences
from kvquilt.evaluation.figures.statistics import Interval, Outcome
from kvquilt.evaluation.figures.summarising import summarise
from kvquilt.evaluation.figures.summary import Summary, Timed
from kvquilt.evaluation.figures.tables import tables
from kvquilt.evaluation.run.run import Finished
from kvquilt.evaluation.run.timed_prompt import TimedPrompt
from kvquilt.evaluation.run.timing import Timing
from tests.evaluation.figures.test_summarising import finished, line, of

ABOUT = {"machine": "m", "device": "cpu", "dtype": "float32", "threads": 1, "load": [0.1, 0.2]}


def like(
    arm: str, name: str, right: list[int], kl: float | None = None, silent: bool = False, **changes: Any
) -> list[dict[str, Any]]:
    """Lines of one more arm, as those of `arm` but for name, scores and distance; a KL for all rows alike."""
    made = []
    for n, each in enumerate(right):
        one = line(arm, n, method=name, score=float(each), right=bool(each), **changes)
        if kl is not None:
            own = {"kl": [kl, kl], "agree": [1.0, 1.0]}
            one["fidelity"] = {"self": own, "gold": {**own, "nll": [1.0, 2.0]}}
        made.append(one | (dict.fromkeys(("score", "right", "scores", "answer")) if silent else {}))
    return made


def told(*more: list[dict[str, Any]], **options: Any) -> Summary:
    lines = (*finished().lines, *(each for arm in more for each in arm))
    return summarise(Finished(lines, {}), resamples=500, **options)


def timed(item: str, full: list[float], compiled: float = 6.0, **arms: list[float]) -> TimedPrompt:
    """`none` and `fewer` for short."""
    names = {"none": "none", "epic": "epic:k=2", "few": "fewer-documents:1", "fewer": "fewer-documents:2"}
    named = {
        "full": full,
        **{names[name]: each for name, each in arms.items()},
        "prefix-hit": [each / 8 for each in full],
    }
    times = {name: Timing(tuple(each), tuple(2 * one for one in each)) for name, each in named.items()}
    return TimedPrompt(item, 100, times, {"epic:k=2": compiled, "none": compiled}, ABOUT)


def test_times_are_ratios_of_one_round_and_say_when_compiling_has_paid() -> None:
    prompt = timed("item-1", [2, 4, 2, 4, 2], epic=[1, 1, 1, 1, 1], none=[3, 3, 3, 3, 3])
    found = told(timing=[prompt])
    assert found.measured
    work = of(found, "epic:k=2").work
    assert work is not None
    assert work.timed == Timed(0.5, 0.25, 0.5, 0.5, 1.0, 5, 1, break_even=6.0)
    assert (work.first_token, found.first_token(of(found, "epic:k=2"))) == (0.25, 0.5)
    reuse = of(found, "none").work
    assert reuse is not None
    assert reuse.timed is not None
    assert (reuse.timed.ratio, reuse.timed.break_even) == (1.5, None), "no faster, so it never pays"
    assert found.prefix_hit == Timed(0.125, 0.125, 0.125, 0.125, 0.25, 5, 1)
    assert found.first_token(of(found, "no-context")) is None, "where some are measured, single readings are not told"
    single = told()
    assert not single.measured
    assert single.first_token(of(single, "epic:k=2")) == 0.25


def test_several_prompts_count_together() -> None:
    prompts = [
        timed("item-1", [2.0] * 5, epic=[1.0] * 5), timed("item-2", [8.0] * 5, compiled=10.0, epic=[1.0] * 5)
    ]  # fmt: skip
    work = of(told(timing=prompts), "epic:k=2").work
    assert work is not None
    assert work.timed is not None
    assert (work.timed.ratio, work.timed.repeats, work.timed.prompts) == (0.3125, 10, 2)
    assert work.timed.break_even == pytest.approx(16 / (10 - 2))


def fewer() -> list[list[dict[str, Any]]]:
    """By single readings two documents take as long as epic, and are always right; one takes far less, and is never."""
    return [
        like("full", f"fewer-documents:{k}", [right] * 6, kl=1.0, seconds={"first_token": seconds})
        for k, seconds, right in ((1, 0.05, 0), (2, 0.24, 1))
    ]


def test_measured_times_choose_the_fewer_documents_that_a_method_is_held_against() -> None:
    found = of(told(*fewer()), "epic:k=2").scored
    assert found is not None
    assert found.fewer is not None
    assert (found.fewer.arm, found.fewer.difference.value) == ("fewer-documents:2", pytest.approx(4 / 6 - 1))
    some = [[1.0] * 5, [0.25] * 5, [0.26] * 5, [0.8] * 5]
    full, epic, few, two = some
    measured = told(*fewer(), timing=[timed("item-1", full, epic=epic, few=few, fewer=two)])
    held = of(measured, "epic:k=2").scored
    assert held is not None
    assert held.fewer is not None
    assert (held.fewer.arm, held.fewer.difference.value) == ("fewer-documents:1", pytest.approx(4 / 6))
    assert (
        "epic:k=2 beats fewer-documents:1, which takes about as long to the first token (0.260 of full prefill's time "
        "against 0.250, measured): score +0.667 [+0.500, +1.000]."
    ) in sentences(measured)
    # one of those that are compared was not timed: single readings for all of them
    partly = told(*fewer(), timing=[timed("item-1", full, epic=epic, few=few)])
    other = of(partly, "epic:k=2").scored
    assert other is not None
    assert other.fewer is not None
    assert other.fewer.arm == "fewer-documents:2"
    assert any("(0.240 of full prefill's time against 0.250, single readings)" in each for each in sentences(partly))


def test_what_takes_another_time_is_not_said_to_take_as_long() -> None:
    (said,) = [each for each in sentences(told(fewer()[0])) if each.startswith("none ")]
    assert "fewer-documents:1, which takes less long to the first token (0.050 of full prefill's time" in said
    longer = fewer()[1]
    for each in longer:
        each["seconds"] = {"first_token": 0.9}
    assert any("takes longer to the first token (0.900" in each for each in sentences(told(longer)))


DRAWS = [
    like("epic:k=2", f"random:15%,seed={seed}", right, kl=kl)
    for seed, right, kl in ((1, [1, 0, 0, 0, 0, 0], 1.0), (2, [1, 1, 0, 0, 1, 0], 3.0))
]


def test_random_draws_are_one_control_with_a_mean_and_a_range() -> None:
    found = told(*DRAWS)
    (control,) = found.random
    assert (control.name, control.arms) == ("random:15%", ("random:15%,seed=1", "random:15%,seed=2"))
    assert (control.items, control.charged) == (6, pytest.approx(0.1))
    assert (control.kl.value, control.kl_range) == (pytest.approx(2.0), (pytest.approx(1.0), pytest.approx(3.0)))
    assert control.score is not None
    # by group: 1 and 1/2 of 2 draws, 0, 1/2 and 0
    assert control.score == Interval(pytest.approx(2 / 6), 0.0, 0.75)
    assert control.score_range == (pytest.approx(1 / 6), pytest.approx(3 / 6))


def test_each_selector_says_whether_it_beats_chance() -> None:
    found = told(*DRAWS)
    scored, fidelity = of(found, "epic:k=2").scored, of(found, "epic:k=2").fidelity
    assert scored is not None
    assert scored.random is not None
    # groups less the mean of the draws: -1/4, 1/2, 3/4
    assert scored.random.arm == "random:15%"
    assert scored.random.difference == Interval(pytest.approx(1 / 3), -0.25, 0.75)
    assert scored.random.outcome is Outcome.TIE
    assert fidelity is not None
    assert fidelity.random is not None
    assert fidelity.random.difference == Interval(pytest.approx(0.875 - 2), -1.5, pytest.approx(-0.375))
    assert fidelity.random.outcome is Outcome.WIN, "nearer to full prefill is better"
    for other in ("none", "full", "random:15%,seed=1"):
        scores = of(found, other).scored
        assert scores is not None
        assert scores.random is None, "it chooses no rows, or by chance"
    adjusted = {arm.method: arm.scored.p for arm in found.arms if arm.scored is not None}
    assert adjusted["random:15%,seed=1"] is None, "a control is in no family of tests"
    assert adjusted["none"] == 0.5, "two methods, as without them"


def test_a_selector_is_held_against_draws_that_cost_as_much_over_the_same_segments() -> None:
    dear = [like("full", f"random:90%,seed={n}", [1] * 6, kl=0.1, ledger=charged(90)) for n in (1, 2)]
    other = [
        like("full", f"random:10%,writer=neighbours,seed={n}", [1] * 6, kl=0.1, ledger=charged(10)) for n in (1, 2)
    ]
    found = told(*DRAWS, *dear, *other)
    assert [each.name for each in found.random] == ["random:15%", "random:90%", "random:10%,writer=neighbours"]
    assert found.random[1].charged == pytest.approx(0.9)
    scored = of(found, "epic:k=2").scored
    assert scored is not None
    assert scored.random is not None
    assert scored.random.arm == "random:15%"


def charged(share: int) -> dict[str, Any]:
    account = line("epic:k=2", 0)["ledger"]
    return {**account, "spending": {**account["spending"], "tokens": 100, "layers": 1, "probe": 0, "repair": share}}


def test_one_seed_is_no_control_and_none_counts_twice() -> None:
    assert told(DRAWS[0]).random == ()
    same = like("epic:k=2", "random:15%,seed=01", [0] * 6, kl=1.0)
    assert told(DRAWS[0], same).random == ()
    assert told(*DRAWS, same).random[0].arms == ("random:15%,seed=1", "random:15%,seed=2")
    (without,) = told(DRAWS[0], like("epic:k=2", "random:15%", [0] * 6, kl=1.0)).random
    assert (without.name, len(without.arms)) == ("random:15%", 2)


def test_silent_draws_and_refused_ones() -> None:
    quiet = [like("epic:k=2", f"random:15%,seed={n}", [0] * 6, kl=1.0, silent=True) for n in (1, 2)]
    found = told(*quiet)
    assert found.random[0].score is found.random[0].score_range is None
    scored, fidelity = of(found, "epic:k=2").scored, of(found, "epic:k=2").fidelity
    assert scored is not None
    assert scored.random is None
    assert fidelity is not None
    assert fidelity.random is not None
    nothing = dict.fromkeys(("answer", "score", "right", "scores", "fidelity", "ledger"))
    refused = [{**each, **nothing, "refused": "why"} if n == 5 else each for n, each in enumerate(DRAWS[0])]
    partly = told(refused, DRAWS[1])
    assert partly.random[0].items == 5
    held = of(partly, "epic:k=2").scored
    assert held is not None
    assert held.random is None, "there are no pairs on every item"


def test_a_table_shows_selectors_beside_random_rows() -> None:
    found = told(*DRAWS)
    (table,) = [each for each in tables(found, "f1") if each.title == "Selectors against random rows"]
    rows = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    assert [row["arm"] for row in rows] == ["random:15% (2 draws)", "epic:k=2"]
    assert rows[0]["f1"] == "0.333 [0.000, 0.750], draws 0.167 to 0.500"
    assert rows[0]["KL"] == "2.000 [2.000, 2.000], draws 1.000 to 3.000"
    assert (rows[1]["f1 to random"], rows[1]["held against"]) == (
        "+0.333 [-0.250, +0.750] not told from it", "random:15%"
    )  # fmt: skip
    assert rows[1]["KL to random"].endswith("beats it")
    assert "random:15%: 2 draws; a control needs 5." in table.notes
    more = [like("epic:k=2", f"random:15%,seed={n}", [0] * 6, kl=1.0) for n in range(3, 6)]
    alone = like("epic:k=2", "fusionrag", [0] * 6, kl=1.0)
    (whole,) = [each for each in tables(told(*DRAWS, *more, alone), "f1") if each.title.startswith("Selectors")]
    assert whole.notes[1:] == ("No draws over the same segments for fusionrag.",)
    assert not [each for each in tables(told(), "f1") if each.title.startswith("Selectors")]


def test_a_method_that_does_not_need_its_documents_is_named() -> None:
    better = like("epic:k=2", "deranged:epic:k=2", [0] * 6, kl=9.0)
    found = told(better)
    scored, fidelity = of(found, "epic:k=2").scored, of(found, "epic:k=2").fidelity
    assert scored is not None
    assert scored.deranged is not None
    assert (scored.deranged.arm, scored.deranged.outcome) == ("deranged:epic:k=2", Outcome.WIN)
    assert fidelity is not None
    assert fidelity.deranged is not None
    assert fidelity.deranged.outcome is Outcome.WIN
    assert not [each for each in sentences(found) if "deranged" in each]
    control = of(found, "deranged:epic:k=2").scored
    assert control is not None
    assert (control.deranged, control.fewer) == (None, None)
    as_good = told(like("epic:k=2", "deranged:epic:k=2", [1, 0, 1, 1, 1, 0], kl=0.5))
    assert [each for each in sentences(as_good) if "deranged" in each] == [
        "epic:k=2 scores no better than over the documents of other questions (deranged:epic:k=2): +0.000 [-0.500, "
        "+0.500]. Nothing says that its score comes from its documents.",
        "epic:k=2 is no nearer to full prefill than over the documents of other questions (deranged:epic:k=2): KL "
        "+0.375 [+0.000, +1.125].",
    ]


def test_work_says_which_sort_of_figure_its_times_are() -> None:
    def work(found: Summary) -> tuple[dict[str, str], tuple[str, ...]]:
        (table,) = [each for each in tables(found, "f1") if each.title == "Work"]
        return dict(zip(table.head, next(row for row in table.rows if row[0] == "epic:k=2"), strict=True)), table.notes

    cells, notes = work(told())
    assert cells["first token"] == "0.25"
    assert notes[0].startswith("First token: single readings that nothing warmed up")
    cells, notes = work(told(timing=[timed("item-1", [2, 4, 2, 4, 2], epic=[1, 1, 1, 1, 1])]))
    assert (cells["first token"], cells["seconds"], cells["processor"], cells["pays after"]) == (
        "0.500 [0.250, 0.500]", "1", "0.500", "6.0"
    )  # fmt: skip
    assert notes[0].startswith("First token: measured, 5 repeats on a prompt of median length")
    assert "the question alone on a ready cache: 0.125 [0.125, 0.125]" in notes[1]


def test_nothing_is_said_of_the_work_of_rows_that_were_computed_beside_it() -> None:
    found = told(like("none", "insert:target", [1] * 6, kl=0.1))
    arm = of(found, "insert:target")
    assert arm.work is None
    assert arm.fidelity is not None
    assert found.first_token(arm) is None
    by_title = {table.title: [row[0] for row in table.rows] for table in tables(found, "contains_em")}
    assert "insert:target" in by_title["How far from full prefill"]
    assert "insert:target" not in by_title["Work"]
