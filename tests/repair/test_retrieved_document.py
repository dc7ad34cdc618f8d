"""The retriever's best documents: next to the question or in place, several of them, a part of a long one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvquilt.ledger import Ledger
from kvquilt.placement import place_runs
from kvquilt.prompt import Run
from kvquilt.reading import Reader
from kvquilt.repair.presets import find_method
from kvquilt.repair.retrieved_document import RetrievedDocument
from kvquilt.repair.scene import Scene
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import tiny
from tests.oracle import runs_of
from tests.repair.scenes import scene_of, spans_of


def ranked(scene: Scene, *runs: int) -> Scene:
    return dataclasses.replace(scene, placement=dataclasses.replace(scene.placement, ranking=runs))


def test_the_best_come_first_and_an_exact_one_is_passed_over() -> None:
    scene = ranked(scene_of("iABCi", (2, 3, 2, 4, 2)), 3, 1, 2)
    assert RetrievedDocument(2, "head").choose(scene).ranking.tolist() == [7, 8, 9, 10, 2, 3, 4]
    exact = ranked(scene_of("iABCi", (2, 3, 2, 4, 2), exact=[3]), 3, 1, 2)
    assert RetrievedDocument(2, "head").choose(exact).ranking.tolist() == [2, 3, 4]
    assert not len(RetrievedDocument(1).choose(exact).ranking)


def test_what_nobody_ranked_is_not_chosen() -> None:
    ranking = RetrievedDocument(3).choose(scene_of("iABi", (2, 3, 2, 2))).ranking
    assert ranking.dtype == torch.int64
    assert not len(ranking)


@pytest.mark.parametrize(("part", "rows"), [("head", [0, 1, 2]), ("tail", [7, 8, 9])])
def test_a_small_budget_leaves_the_head_or_the_tail(part: str, rows: list[int]) -> None:
    scene = ranked(scene_of("iABi", (2, 10, 5, 2)), 1)
    ranking = find_method(f"retrieved-document:part={part}").selector.choose(scene).ranking
    assert sorted(ranking.tolist()) == list(range(2, 12))
    assert spans_of(scene, ranking[:3].tolist())[0] == rows


@pytest.mark.parametrize("place", [0, 300, 599])
def test_a_window_grows_from_where_the_tokens_of_the_question_stand(place: int) -> None:
    scene = scene_of("iAi", (2, 600, 3))
    runs = list(scene.placement.runs)
    asked, ids = (91, 92, 93), [i if i not in (91, 92, 93) else 7 for i in runs[1].ids]
    ids[max(0, place - 1) : place + 2] = asked[: len(ids[max(0, place - 1) : place + 2])]
    runs = [runs[0], Run(tuple(ids), runs[1].document), Run(asked)]
    scene = ranked(dataclasses.replace(scene, placement=place_runs(runs)), 1)
    ranking = RetrievedDocument(part="window").choose(scene).ranking
    assert sorted(ranking.tolist()) == list(range(2, 602))
    assert set(range(max(0, place - 1), min(600, place + 2))) <= set(spans_of(scene, ranking[:5].tolist())[0])
    for count in (5, 50, 500):
        window = spans_of(scene, ranking[:count].tolist())[0]
        assert window == list(range(window[0], window[0] + count)), "no row is left out"


@pytest.mark.parametrize(
    ("method", "order", "why"),
    [
        ("retrieved-document", ["A", "C", "B"], "best-ranked: next to the question, recomputed"),
        ("retrieved-document:order=given", ["A", "B", "C"], "best-ranked, recomputed"),
        ("retrieved-document:documents=2", ["C", "A", "B"], "best-ranked: next to the question, recomputed"),
    ],
)
def test_the_best_document_is_moved_or_stays_and_is_computed_whole(method: str, order: list[str], why: str) -> None:
    found, ledger = find_method(method), Ledger()
    placement = place_runs(runs_of("ABCi", (9, 8, 7, 3)), found.order, [1, 0, 2], found.moved)
    reader = Reader(tiny(), Store.open(None, 1 << 28), Isolated((9, 9)), ())
    _, cache = reader.read(placement, found, None, ledger, 0)
    reader.model.pool.release(cache)
    assert [d.id for d in ledger.documents] == order
    best = next(d for d in ledger.documents if d.id == "B")
    assert (best.recomputed, best.why, best.source) == (8, why, "-")
    others = {"A"} if "documents" in method else set()
    assert {d.id for d in ledger.documents if d.recomputed} == {"B"} | others
