"""Post-processors: spendable rows of the same document, each once, longer heads only add, budgets hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger
from kvquilt.placement import place_runs
from kvquilt.reading import Reader
from kvquilt.repair.plan import PostProcessor, cut
from kvquilt.repair.post import CapRuns, Expand, MergeGap, Quota, RoundToBlock
from kvquilt.repair.presets import POST, find_method
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import tiny
from tests.oracle import close, full_prefill, runs_of, stock
from tests.repair.scenes import scene_of

SCENE = scene_of("iABiCi", (2, 10, 7, 3, 20, 2))  # documents at 2..11, 12..18 and 22..41
EXACT = scene_of("iABiCi", (2, 10, 7, 3, 20, 2), exact=[2])

one_post = st.one_of(
    st.integers(0, 6).map(Expand),
    st.integers(1, 8).map(RoundToBlock),
    st.integers(0, 6).map(MergeGap),
    st.integers(1, 4).map(CapRuns),
    st.floats(0.01, 1).map(Quota),
)
posts = st.lists(one_post, min_size=1, max_size=3)
scenes = st.sampled_from([SCENE, EXACT])


def head_of(scene: Scene, data: st.DataObject) -> torch.Tensor:
    return torch.tensor(data.draw(st.lists(st.sampled_from(scene.slots.tolist()), unique=True)), dtype=torch.int64)


def through(post: Sequence[PostProcessor], head: torch.Tensor, scene: Scene) -> list[int]:
    for each in post:
        head = each.apply(head, scene)
    assert head.dtype == torch.int64
    return head.tolist()


def runs_in(scene: Scene, slots: Sequence[int]) -> int:
    """Stretches of neighbours, counted per document."""
    held = set(slots)
    return sum(slot in held and (slot == span.start or slot - 1 not in held) for span in scene.spans for slot in span)


@settings(max_examples=200, deadline=None)
@given(posts, scenes, st.data())
def test_spendable_rows_of_the_same_documents_each_once(
    post: list[PostProcessor], scene: Scene, data: st.DataObject
) -> None:
    head = head_of(scene, data)
    out = through(post, head, scene)
    assert len(set(out)) == len(out)
    touched = [span for span in scene.spans if set(span) & set(head.tolist())]
    assert set(out) <= {slot for span in touched for slot in span}


@settings(max_examples=200, deadline=None)
@given(posts, scenes, st.data())
def test_a_longer_head_gives_the_same_and_more(post: list[PostProcessor], scene: Scene, data: st.DataObject) -> None:
    head = head_of(scene, data)
    known: list[int] = []
    for length in range(len(head) + 1):
        out = through(post, head[:length], scene)
        assert out[: len(known)] == known
        known = out


@settings(max_examples=200, deadline=None)
@given(posts, scenes, st.integers(0, 120), st.data())
def test_a_budget_holds_and_keeps_the_longest_head_that_fits(
    post: list[PostProcessor], scene: Scene, left: int, data: st.DataObject
) -> None:
    ranking = head_of(scene, data)
    chosen = cut(Choice(ranking), post, scene, left).tolist()
    assert len(chosen) * scene.layers <= left
    fitting = [through(post, ranking[:n], scene) for n in range(len(ranking) + 1)]
    assert chosen == max((f for f in fitting if len(f) * scene.layers <= left), key=len)


@settings(max_examples=100, deadline=None)
@given(one_post.filter(lambda post: not isinstance(post, Expand)), scenes, st.data())
def test_twice_is_once(post: PostProcessor, scene: Scene, data: st.DataObject) -> None:
    once = post.apply(head_of(scene, data), scene)
    assert torch.equal(post.apply(once, scene), once)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), scenes, st.data())
def test_never_more_runs_however_it_is_cut(runs: int, scene: Scene, data: st.DataObject) -> None:
    head = head_of(scene, data)
    out = through([CapRuns(runs)], head, scene)
    assert set(out) <= set(head.tolist())
    assert all(runs_in(scene, out[:n]) <= runs for n in range(len(out) + 1))
    if runs_in(scene, head.tolist()) <= 1:
        assert set(out) == set(head.tolist()), "one run in the end: nothing is left out"
    left_out = set(head.tolist()) - set(out)
    assert not left_out or runs_in(scene, out) == runs, "rows wait only while all runs are taken"
    assert all(runs_in(scene, [*out, slot]) > runs for slot in left_out)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 6), scenes, st.data())
def test_merged_gaps_are_those_between_two_chosen_rows(gap: int, scene: Scene, data: st.DataObject) -> None:
    head = head_of(scene, data)
    held = set(head.tolist())
    expected = set(held)
    for span in scene.spans:
        those = sorted(held & set(span))
        for a, b in pairwise(those):
            if b - a - 1 <= gap:
                expected |= set(range(a, b))
    assert set(through([MergeGap(gap)], head, scene)) == expected


def ranked(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def test_a_window_ends_with_its_document() -> None:
    assert through([Expand(2)], ranked(25, 12, 41), SCENE) == [25, 24, 26, 23, 27, 12, 13, 14, 41, 40, 39]
    assert through([Expand(0)], ranked(25, 12), SCENE) == [25, 12]
    assert set(through([Expand(1000)], ranked(25, 13), SCENE)) == {*range(22, 42), *range(12, 19)}
    assert through([Expand(2)], ranked(25, 27), SCENE) == [25, 24, 26, 23, 27, 28, 29]


def test_windows_of_many_rows_are_those_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head = ranked(25, 12, 41, 24, 30, 11, 2, 16)
    for window in range(25):
        whole = through([Expand(window)], head, SCENE)
        with monkeypatch.context() as patch:
            patch.setattr("kvquilt.repair.post._PIECE", 1)
            assert through([Expand(window)], head, SCENE) == whole


def test_blocks_are_counted_from_each_documents_start() -> None:
    assert through([RoundToBlock(4)], ranked(30, 13, 33, 18), SCENE) == [*range(30, 34), *range(12, 16), *range(16, 19)]
    assert through([RoundToBlock(1)], ranked(30, 13), SCENE) == [30, 13]
    assert through([RoundToBlock(100)], ranked(30), SCENE) == list(range(22, 42))


def test_a_gap_is_ranked_behind_the_row_that_closes_it() -> None:
    assert through([MergeGap(2)], ranked(30, 24, 33, 11, 12, 27), SCENE) == [
        30,
        24,
        33,
        32,
        31,
        11,
        12,
        27,
        26,
        25,
        28,
        29,
    ]
    assert through([MergeGap(0)], ranked(30, 28), SCENE) == [30, 28]


def test_rows_that_wait_for_a_run_are_taken_when_it_reaches_them() -> None:
    assert through([CapRuns(1)], ranked(25, 28, 26, 40, 27), SCENE) == [25, 26, 27, 28]
    # once two runs have grown together the best-ranked of those that wait begins the next
    assert through([CapRuns(2)], ranked(25, 27, 40, 13, 26), SCENE) == [25, 27, 26, 40]
    # the last row of one document and the first of the next are no run
    assert through([CapRuns(1)], ranked(11, 12), SCENE) == [11]


def test_a_quota_keeps_the_best_of_each_document() -> None:
    assert through([Quota(0.3)], ranked(2, 22, 3, 4, 5, 12, 13, 14, 23), SCENE) == [2, 22, 3, 4, 12, 13, 23]
    assert through([Quota(1)], SCENE.slots, SCENE) == SCENE.slots.tolist()
    hundred = scene_of("Ai", (100, 1))
    assert len(through([Quota(0.07)], hundred.slots, hundred)) == 7, "0.07 times 100 is 7"


@pytest.mark.parametrize("huge", [10**9, 10**30])
@pytest.mark.parametrize("made", [Expand, RoundToBlock, MergeGap])
def test_a_number_beyond_the_longest_document_costs_no_more_than_its_length(made: type[Expand], huge: int) -> None:
    head = ranked(25, 13, 41, 2)
    assert through([made(huge)], head, SCENE) == through([made(20)], head, SCENE)


@pytest.mark.parametrize("post", [Expand(3), RoundToBlock(3), MergeGap(3), CapRuns(3), Quota(0.5)])
def test_nothing_in_nothing_out(post: PostProcessor) -> None:
    assert through([post], ranked(), SCENE) == []
    assert through([post], ranked(), scene_of("i", (3,))) == []


@pytest.mark.parametrize(
    ("made", "number"),
    [
        (Expand, -1),
        (Expand, 1.5),
        (RoundToBlock, 0),
        (MergeGap, -1),
        (CapRuns, 0),
        (Quota, 0),
        (Quota, 1.1),
        (Quota, float("nan")),
    ],
)
def test_numbers_that_make_no_sense(made: type[PostProcessor], number: float) -> None:
    with pytest.raises(InputError, match=f"got {number}"):
        made(number)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", POST)
def test_each_is_an_option_of_a_method_with_one_number(name: str) -> None:
    method = find_method(f"random:30%,{name}=1")
    assert [type(each) for each in method.post] == [POST[name]]
    with pytest.raises(InputError, match=f"{name} must be a number"):
        find_method(f"random:{name}=some")
    with pytest.raises(InputError, match="nan"):
        find_method(f"random:{name}=nan")


def test_a_method_with_several_stays_within_its_budget() -> None:
    placement = place_runs(runs_of("iABi", (3, 40, 30, 3)))
    reader, ledger = Reader(tiny(), Store.open(None, 1 << 28), Isolated(), ()), Ledger()
    _, cache = reader.read(placement, find_method("random:30%,expand=2,merge_gap=1,cap_runs=3"), None, ledger, 0)
    chosen = ledger.spending
    reader.model.pool.release(cache)
    assert chosen is not None
    assert chosen.allowed == 63
    assert 0 < chosen.repair == 3 * chosen.rows <= 63
    out, cache = reader.read(placement, find_method("random:100%,round_to_block=4"), None, Ledger(), 0)
    reader.model.pool.release(cache)
    assert close(out, full_prefill(stock(), placement.ids)[-1:])
