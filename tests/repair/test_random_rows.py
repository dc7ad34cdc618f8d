"""Random rows: the same for one seed, others for another, nested by budget, everywhere alike."""

from __future__ import annotations

import torch

from kvquilt.repair.random_rows import Random
from tests.repair.scenes import scene_of, spans_of


def test_a_seed_is_an_order_of_all_rows() -> None:
    scene = scene_of("iABi", (3, 40, 60, 2))
    rankings = [Random(seed).choose(scene).ranking for seed in (0, 0, 1)]
    assert torch.equal(rankings[0], rankings[1])
    assert not torch.equal(rankings[0], rankings[2])
    assert all(torch.equal(ranking.sort().values, scene.slots) for ranking in rankings)
    assert not torch.equal(rankings[0], scene.slots)


def test_the_global_generator_is_neither_asked_nor_moved() -> None:
    scene = scene_of("Ai", (50, 1))
    torch.manual_seed(1)
    first, after = Random().choose(scene).ranking, torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    torch.manual_seed(2)
    assert torch.equal(Random().choose(scene).ranking, first)


def test_no_place_is_preferred() -> None:
    """Over many seeds a document gets its share of a head, within four standard errors."""
    scene = scene_of("ABi", (30, 70, 1))
    hits = sum(len(spans_of(scene, Random(seed).choose(scene).ranking[:20].tolist())[0]) for seed in range(100))
    assert abs(hits - 600) < 4 * (100 * 20 * 0.3 * 0.7 * 80 / 99) ** 0.5


def test_without_a_document_there_is_nothing() -> None:
    assert Random().choose(scene_of("i", (5,))).ranking.tolist() == []
