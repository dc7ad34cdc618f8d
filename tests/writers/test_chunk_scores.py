"""Cache-Craft's formulas on cases worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvquilt.writers.chunk_scores import (
    ChunkScores,
    context_impact,
    context_match,
    document_digest,
    kept_attention,
    order_penalty,
    recompute_share,
)


@pytest.mark.parametrize(
    ("inter", "old", "new", "expected"),
    [
        ([3.0, 1.0], "ab", "ab", 1.0),
        ([3.0, 1.0], "ab", "ba", 1.0),
        ([3.0, 1.0], "ab", "xay", 0.75),
        ([3.0, 1.0], "ab", "b", 0.25),
        ([3.0, 1.0], "ab", "xyz", 0.0),
        ([3.0, 1.0], "ab", "", 0.0),
        ([0.0, 0.0], "ab", "ab", 0.0),
        ([2.0, 1.0, 1.0], "aba", "a", 0.75),
    ],
)
def test_kept_attention_is_the_part_given_to_documents_still_there(
    inter: list[float], old: str, new: str, expected: float
) -> None:
    assert kept_attention(inter, old, new) == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("abc", "abc", 0.0),
        ("abc", "cba", 1.0),
        ("abc", "acb", 1 / 3),
        ("abc", "xbyaz", 1.0),
        ("abc", "c", 0.0),
        ("abc", "xyz", 0.0),
        ("", "abc", 0.0),
        ("abcd", "dabc", 0.5),
        ("aba", "ba", 1.0),
    ],
)
def test_the_order_penalty_is_the_part_of_turned_pairs(old: str, new: str, expected: float) -> None:
    assert order_penalty(old, new) == pytest.approx(expected)


def test_a_match_falls_with_the_order() -> None:
    assert context_match([1.0, 1.0, 2.0], "abc", "abcd") == 1.0
    assert context_match([1.0, 1.0, 2.0], "abc", "acb") == pytest.approx(2 / 3)
    assert context_match([1.0, 1.0, 2.0], "abc", "cb") == 0.0
    assert context_match([1.0, 1.0, 2.0], "abc", "ac") == 0.75


def test_what_was_encoded_behind_nothing_matches_nothing_alone() -> None:
    assert context_match([], "", "") == 1.0
    assert context_match([], "", "a") == 0.0
    assert context_match([1.0], "a", "") == 0.0


def test_impact_compares_attention_per_pair() -> None:
    # a = 8 / (4 * 2) + 4 / (4 * 1) = 2, b = 16 / 4^2 = 1
    assert context_impact([8.0, 4.0], [2, 1], 16.0, 4) == pytest.approx(1 / (1 + math.exp(-2)))
    assert context_impact([], [], 16.0, 4) == 0.5
    assert context_impact([1e9], [1], 1e-9, 1) == 1.0


def test_a_share_stays_between_nothing_and_all() -> None:
    assert recompute_share(1.0, 0.5, 1.0) == 0.0
    assert recompute_share(1.0, 0.8, 0.25) == pytest.approx(0.6)
    assert recompute_share(3.0, 0.8, 0.25) == 1.0
    assert recompute_share(0.0, 0.8, 0.25) == 0.0


def test_scores_of_a_segment_are_read_from_its_side_data() -> None:
    a, b = document_digest((1, 2)), document_digest((3,))
    side = {
        "outside": torch.zeros(4),
        "inter": torch.tensor([8.0, 4.0]),
        "intra": torch.tensor([16.0]),
        "earlier": torch.tensor([list(bytes.fromhex(name)) for name in (a, b)], dtype=torch.uint8),
        "earlier-tokens": torch.tensor([2, 1], dtype=torch.int32),
    }
    scores = ChunkScores.of(side, 4)
    assert scores == ChunkScores((a, b), (8.0, 4.0), (2, 1), 16.0, 4)
    impact = 1 / (1 + math.exp(-2))
    assert scores.share(1.0, (a, b)) == 0.0
    assert scores.share(1.0, (b,)) == pytest.approx(impact * (2 / 3))
    assert scores.share(0.5, (b, a)) == pytest.approx(impact / 2)
    assert scores.share(2.0, ()) == 1.0


def test_documents_are_told_apart_by_their_ids() -> None:
    assert len({document_digest(ids) for ids in ((), (1,), (1, 2), (2, 1), (258,))}) == 5
    assert document_digest((1, 2)) == document_digest([1, 2])
