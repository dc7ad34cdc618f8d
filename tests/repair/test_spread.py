"""Evenly spaced rows: every document its share, every gap about the same, whatever the budget."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.repair.spread import Spread, halving
from tests.repair.scenes import scene_of, spans_of

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=5)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 37, 64, 100])
def test_halving_is_an_order_of_all_whose_heads_leave_even_gaps(count: int) -> None:
    order = halving(count).tolist()
    assert sorted(order) == list(range(count))
    for head in range(1, count + 1):
        gaps = [b - a for a, b in pairwise([*sorted(order[:head]), count])]
        wide, narrow = count / 2 ** math.floor(math.log2(head)), count / 2 ** math.ceil(math.log2(head))
        assert max(gaps) <= math.ceil(wide)
        assert min(gaps) >= math.floor(narrow)


def test_one_halving_spelt_out() -> None:
    assert halving(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert halving(6).tolist() == [0, 3, 1, 4, 2, 5]


@settings(max_examples=50, deadline=None)
@given(lengths, st.data())
def test_every_document_gets_its_share_of_every_head(sizes: list[int], data: st.DataObject) -> None:
    scene = scene_of("ABCDE"[: len(sizes)] + "i", [*sizes, 2])
    ranking = Spread().choose(scene).ranking.tolist()
    assert sorted(ranking) == scene.slots.tolist()
    head = data.draw(st.integers(0, len(ranking)))
    held = spans_of(scene, ranking[:head])
    if head >= len(sizes):
        assert all(held), "a document without a row"
    shares = [(len(rows) - 1) / size for rows, size in zip(held, sizes, strict=True)]
    assert max(shares) <= min(len(rows) / size for rows, size in zip(held, sizes, strict=True)) + 1e-9


def test_without_a_document_there_is_nothing() -> None:
    assert Spread().choose(scene_of("i", (5,))).ranking.tolist() == []
