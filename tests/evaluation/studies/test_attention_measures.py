"""Distances of attention on cases that can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvquilt.evaluation.studies.attention_look import Spot
from kvquilt.evaluation.studies.attention_measures import compare, interior_mean, region_means


@dataclass
class Fixed:
    """A look whose weights ``[layers, heads, rows, slots]`` and values ``[layers, kv_heads, slots, dim]`` are given."""

    maps: torch.Tensor
    mixed: torch.Tensor
    spots: tuple[Spot, ...]
    layers: int = field(init=False)

    def __post_init__(self) -> None:
        self.layers = len(self.maps)

    def weights(self, layer: int) -> torch.Tensor:
        return self.maps[layer]

    def values(self, layer: int) -> torch.Tensor:
        return self.mixed[layer]


def spot(*slots: int, around: tuple[int, ...] | None = None) -> Spot:
    there = tuple(s for s in slots if s >= 0) if around is None else around
    return Spot(torch.tensor(slots), torch.tensor(there, dtype=torch.int64))


def one(row: list[float], *spots: Spot) -> Any:
    """One layer, head and row; the values of slots 1 and 2 are (1, 0) and (0, 1), others (9, 9)."""
    values = torch.full((1, 1, len(row), 2), 9.0)
    values[0, 0, 1], values[0, 0, 2] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    return Fixed(torch.tensor([[[row]]]), values, spots)


def test_a_document_of_two_tokens() -> None:
    found = compare(one([0.1, 0.2, 0.3, 0.4], spot(1, 2)), one([0.1, 0.5, 0.1, 0.3], spot(1, 2)))
    assert found.raw[0, 0, 1] == pytest.approx((0.3 + 0.2) / 2)
    assert bool(found.raw[0, 0, [0, 2]].isnan().all()), "two tokens are both of the interior"
    assert found.within[0, 0, 1] == pytest.approx(5 / 6 - 0.4)
    assert found.density[0, :2].tolist() == pytest.approx([0.5, 0.1])
    assert bool(found.density[0, 2:].isnan().all())
    assert found.interior.tolist() == pytest.approx([0.3])
    assert found.error.tolist() == [pytest.approx([0.3**2 + 0.2**2])]
    assert found.norm.tolist() == [pytest.approx([0.2**2 + 0.3**2])]
    assert found.cosine.tolist() == [pytest.approx([1 - 0.13 / math.sqrt(0.13 * 0.26)], abs=1e-6)]
    assert found.mass.tolist() == [pytest.approx([0.1])]
    assert found.by_position[0, [5, 15]].tolist() == pytest.approx([0.3, 0.2])
    assert int(found.by_position.isnan().sum()) == 18
    assert found.seen == 1.0


def test_nothing_differs_from_itself() -> None:
    full = one([0.1, 0.2, 0.3, 0.4], spot(1, 2))
    found = compare(full, full)
    for name in ("raw", "within", "error", "mass", "by_position"):
        assert float(getattr(found, name).nan_to_num().abs().max()) == 0.0
    assert float(found.cosine) == pytest.approx(0.0, abs=1e-12)


def test_tokens_are_compared_and_not_places() -> None:
    """Two documents that changed places, each as much looked at as before."""
    full = one([0.1, 0.2, 0.3, 0.4], spot(1, 2), spot(3))
    moved = one([0.1, 0.4, 0.2, 0.3], spot(2, 3), spot(1))
    found = compare(full, moved)
    assert float(found.raw.nan_to_num().max()) == 0.0
    assert float(found.mass.max()) == 0.0


def test_what_has_no_slot_is_not_looked_at() -> None:
    found = compare(one([0.1, 0.2, 0.3, 0.4], spot(1, 2)), one([0.3, 0.7, 0.0], spot(-1, 1)))
    assert found.raw[0, 0, 1] == pytest.approx((0.2 + 0.4) / 2)
    assert found.within[0, 0, 1] == pytest.approx((0.4 + 0.4) / 2)
    assert found.seen == 0.5
    gone = compare(one([0.1, 0.2, 0.3, 0.4], spot(1, 2)), one([0.3, 0.7, 0.0], spot(-1, -1)))
    assert gone.error.tolist() == gone.norm.tolist()
    assert bool(gone.cosine.isnan().all())
    assert gone.mass.tolist() == [pytest.approx([0.5])]


def test_soft_tokens_count_for_what_is_retrieved_and_for_nothing_else() -> None:
    plain, wrapped = one([0.4, 0.2, 0.4], spot(1)), one([0.3, 0.2, 0.5], spot(1, around=(1, 2)))
    found = compare(plain, wrapped)
    assert found.raw[0, 0, 1] == 0.0
    assert found.mass.tolist() == [pytest.approx([0.5])]
    assert found.error.tolist() == [pytest.approx([0.25])]


def test_heads_and_rows_each_count_before_anything_is_averaged() -> None:
    """Differences of opposite sign in two heads, and in two rows, do not cancel."""
    full = Fixed(torch.full((1, 2, 2, 1), 0.5), torch.ones(1, 1, 1, 1), (spot(0),))
    arm = Fixed(torch.tensor([[[[0.6], [0.4]], [[0.3], [0.7]]]]), torch.ones(1, 1, 1, 1), (spot(0),))
    found = compare(full, arm)  # type: ignore[arg-type]
    assert found.raw[0, :, 1].tolist() == pytest.approx([0.1, 0.2])
    assert found.error[0].tolist() == pytest.approx([0.02, 0.08])
    assert found.mass[0].tolist() == pytest.approx([0.1, 0.2])


def test_grouped_heads_take_the_values_of_their_group() -> None:
    values = torch.tensor([1.0, 10.0]).view(1, 2, 1, 1)  # heads 0, 1 and heads 2, 3
    full = Fixed(torch.full((1, 4, 1, 1), 0.5), values, (spot(0),))
    arm = Fixed(torch.full((1, 4, 1, 1), 1.0), values, (spot(0),))
    assert compare(full, arm).error[0].tolist() == pytest.approx([0.25, 0.25, 25.0, 25.0])  # type: ignore[arg-type]


def test_documents_count_alike_whatever_their_length() -> None:
    full = one([0.0, 0.0, 0.0, 0.0], spot(1, 2), spot(3))
    arm = one([0.0, 0.1, 0.1, 0.5], spot(1, 2), spot(3))
    assert compare(full, arm).raw[0, 0, 1] == pytest.approx((0.1 + 0.5) / 2)


def test_regions_go_by_a_token_s_middle() -> None:
    assert region_means(torch.arange(10.0)).tolist() == pytest.approx([0.0, 4.5, 9.0])
    front, interior, rear = region_means(torch.arange(5.0)).tolist()  # middles at 0.1, 0.3, ..., 0.9
    assert math.isnan(front)
    assert (interior, rear) == (1.5, 4.0)
    assert region_means(torch.arange(20.0)).tolist() == pytest.approx([0.5, 9.5, 18.5])


def test_the_interior_takes_parts_of_tokens() -> None:
    # of four tokens the outer ones lie in it by 0.15 of 0.25
    values = torch.tensor([1.0, 2.0, 3.0, 10.0])
    assert float(interior_mean(values)) == pytest.approx((0.15 * 11 + 0.25 * 5) / 0.8)
    assert float(interior_mean(torch.tensor([3.0]))) == pytest.approx(3.0)
