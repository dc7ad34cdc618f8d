"""What holds for every repair pass, whatever chose the rows: endpoints, splits, exact rows, frames, every order."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement, place_runs
from kvquilt.repair.operator import repair
from kvquilt.repair.scene import joined
from kvquilt.segment import place
from kvquilt.writers.isolated import Isolated
from tests.models import FAMILIES as ALL
from tests.models import tiny
from tests.oracle import close, far, full_prefill, pure_reuse, runs_of, stock
from tests.repair.passes import FAMILIES, document_slots, inline_spans, passed, same_slots, with_rows
from tests.repair.tokenwise import stored, walk

LAYERS = 3
PLACEMENT = place_runs(runs_of("iABi", (3, 17, 15, 4)))
families = pytest.mark.parametrize("family", FAMILIES)
few = settings(max_examples=8, deadline=None)
shapes = st.lists(st.tuples(st.sampled_from("iABCD"), st.integers(1, 15)), min_size=1, max_size=6)
chosen = st.sets(st.integers(0, 31), min_size=1)  # of 32 document slots


def behind(shape: list[tuple[str, int]], prefix: int) -> tuple[Placement, tuple[int, ...]]:
    """The shape with a question behind it, and in front of it an inline prefix of that many tokens, and the prefix."""
    kinds = ("i" if prefix else "") + "".join(kind for kind, _ in shape) + "i"
    placement = place_runs(runs_of(kinds, [*([prefix] if prefix else []), *(n for _, n in shape), 2]))
    return placement, placement.runs[0].ids if prefix else ()


# T1


@pytest.mark.parametrize("family", ALL)
@settings(max_examples=5, deadline=None)
@given(shapes, st.sampled_from([0, 1, 7]))
def test_all_rows_are_full_prefill_and_none_is_pure_reuse(
    family: str, shape: list[tuple[str, int]], prefix: int
) -> None:
    """Whatever was in the slots, and behind an exact prefix of odd length (T4)."""
    placement, encoded = behind(shape, prefix)
    every, slots = passed(tiny(family), placement, [[range(placement.tokens)]], 2, prefix=encoded)
    assert close(every, full_prefill(stock(family), placement.ids)[-2:])
    nothing, after = passed(tiny(family), placement, [inline_spans(placement)], 2, prefix=encoded)
    assert close(nothing, pure_reuse(stock(family), placement, encoded)[-2:])
    documents = [placement.span(i) for i in placement.documents()]
    if documents:
        moved = joined(documents)
        for one, other in ((slots[0][0], after[0][0]), (slots[0][1], after[0][1])):
            assert far(other[:, moved], one[:, moved]) < 1e-4, "T3: layer 0 is exact in every method"


@families
def test_some_rows_behind_an_exact_prefix_equal_the_walk(family: str) -> None:
    """T4: what the prefix shifts are the rows' positions, and nothing else."""
    placement, encoded = behind([("A", 17), ("B", 15)], 7)
    those = document_slots(placement)[torch.tensor([0, 1, 5, 16, 17, 29])]
    rows = torch.zeros(LAYERS, placement.tokens, dtype=torch.bool)
    rows[:, joined(inline_spans(placement))] = rows[:, those] = True
    truth, slots = walk(stock(family), placement.ids, stored(stock(family), placement, encoded), rows)
    out, ours = passed(tiny(family), placement, [with_rows(placement, those)], prefix=encoded)
    assert close(out[-1], truth[placement.tokens - 1])
    assert same_slots(ours, slots)


# T2


@families
@few
@given(chosen)
def test_one_fused_pass_equals_two_at_every_split(family: str, those: set[int]) -> None:
    plan = with_rows(PLACEMENT, document_slots(PLACEMENT)[sorted(those)])
    whole, slots = passed(tiny(family), PLACEMENT, [plan])
    for split in {1, len(plan.rows) // 2, len(plan.rows) - 1}:
        first, second = plan.rows[:split], plan.rows[split:]
        parts = [RowPlan(first, PLACEMENT.tokens), RowPlan(second, PLACEMENT.tokens)]
        out, after = passed(tiny(family), PLACEMENT, parts)
        assert close(out, whole)
        assert same_slots(after, slots)


@families
@few
@given(chosen, st.integers(0, 99))
def test_the_order_of_a_ranking_is_not_the_order_of_rows(family: str, those: set[int], seed: int) -> None:
    slots = document_slots(PLACEMENT)[sorted(those)]
    shuffled = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))]
    assert torch.equal(with_rows(PLACEMENT, shuffled).rows, with_rows(PLACEMENT, slots).rows)
    one, _ = passed(tiny(family), PLACEMENT, [with_rows(PLACEMENT, slots)])
    two, _ = passed(tiny(family), PLACEMENT, [with_rows(PLACEMENT, shuffled)])
    assert torch.equal(one, two)


@families
@few
@given(chosen, st.sets(st.integers(0, 16)))
def test_adding_exact_rows_changes_nothing(family: str, those: set[int], more: set[int]) -> None:
    """Document A stands behind the very prefix it was encoded behind."""
    placement, encoded = behind([("A", 17), ("B", 15)], 7)
    exact, reused = (torch.arange(placement.span(i).start, placement.span(i).stop) for i in placement.documents())
    rows = reused[sorted(n % 15 for n in those)].unique()
    both = torch.cat((rows, exact[sorted(more)]))
    without, slots = passed(tiny(family), placement, [with_rows(placement, rows)], prefix=encoded)
    out, after = passed(tiny(family), placement, [with_rows(placement, both)], prefix=encoded)
    assert close(out, without)
    assert same_slots(after, slots)


# T6


@families
def test_a_prompt_moved_as_a_whole_has_the_same_logits(family: str) -> None:
    model, at = tiny(family), PLACEMENT.documents()
    segments = dict(Isolated().compile(model, [PLACEMENT.runs[i].ids for i in at]))
    rows = joined([range(3), range(5, 11), range(30, 39)])

    def moved(by: int, keys_by: int) -> torch.Tensor:
        with model.pool.lend(PLACEMENT.tokens) as cache:
            for n, segment in segments.items():
                span = PLACEMENT.span(at[n])
                where = cache.slot_keys[:, 0, :, span.start : span.stop]
                place(segment, span.start + keys_by, model.capability.tables, where)
                cache.slot_values[:, 0, :, span.start : span.stop] = segment.values
            return repair(model, cache, PLACEMENT.ids, RowPlan(rows, PLACEMENT.tokens, offset=by), 4)

    for by in (1, 37, 900):
        assert close(moved(by, by), moved(0, 0))
    assert not close(moved(0, 1), moved(0, 0)), "keys shifted by one against the rows are caught"


# T9


@families
def test_every_order_of_four_documents_behind_one_token(family: str) -> None:
    """A question of one token: its row is computed, twice the same bits, and the order matters to it."""
    runs = runs_of("ABCDi", (9, 4, 12, 1, 1))
    seen = []
    for order in permutations(range(4)):
        placement = place_runs([*(runs[i] for i in order), runs[4]])
        plan = [range(placement.tokens - 1, placement.tokens)]
        out, _ = passed(tiny(family), placement, [plan])
        again, _ = passed(tiny(family), placement, [plan])
        assert torch.equal(out, again)
        assert bool(torch.isfinite(out).all())
        assert close(out, pure_reuse(stock(family), placement))
        seen.append(out)
    assert not any(close(a, b) for n, a in enumerate(seen) for b in seen[:n])


# a batch, and a shifted cache


@families
def test_documents_compiled_together_repair_as_those_compiled_alone(family: str) -> None:
    model, rows = tiny(family), document_slots(PLACEMENT)[torch.arange(0, 32, 3)]
    together, _ = passed(model, PLACEMENT, [with_rows(PLACEMENT, rows)])
    with model.pool.lend(PLACEMENT.tokens) as cache:
        for i in PLACEMENT.documents():
            [(_, segment)] = Isolated().compile(model, [PLACEMENT.runs[i].ids])
            span = PLACEMENT.span(i)
            place(segment, span.start, model.capability.tables, cache.slot_keys[:, 0, :, span.start : span.stop])
            cache.slot_values[:, 0, :, span.start : span.stop] = segment.values
        alone = repair(model, cache, PLACEMENT.ids, with_rows(PLACEMENT, rows))
    assert close(alone, together)


@pytest.mark.parametrize("family", ALL)
def test_keys_one_position_too_far_or_one_slot_from_their_values_are_caught(family: str) -> None:
    truth = pure_reuse(stock(family), PLACEMENT)[-1:]
    spans = inline_spans(PLACEMENT)
    start, stop = PLACEMENT.span(1).start, PLACEMENT.span(2).stop

    def slots(cache: SlotCache) -> None:
        cache.slot_values[:, :, :, start:stop] = cache.slot_values[:, :, :, start:stop].roll(1, dims=3)

    def angles(cache: SlotCache) -> None:
        for layer, table in enumerate(tiny(family).capability.tables):
            if table is not None:
                keys = cache.slot_keys[layer, :, :, start:stop]
                table.rotate(keys.clone(), 1, keys)

    assert close(passed(tiny(family), PLACEMENT, [spans])[0], truth)
    assert not close(passed(tiny(family), PLACEMENT, [spans], change=slots)[0], truth)
    assert not close(passed(tiny(family), PLACEMENT, [spans], change=angles)[0], truth)


def test_what_lies_in_slots_that_are_computed_never_matters() -> None:
    """Slots are written before anybody reads them, so NaN there, or another request's keys, are the same."""
    plan = with_rows(PLACEMENT, document_slots(PLACEMENT)[torch.tensor([0, 4, 9, 30])])

    def poison(cache: SlotCache) -> None:
        cache.slot_keys[:, :, :, plan.rows] = cache.slot_values[:, :, :, plan.rows] = float("nan")

    clean, _ = passed(tiny(), PLACEMENT, [plan])
    poisoned, _ = passed(tiny(), PLACEMENT, [with_rows(PLACEMENT, plan.rows)], change=poison)
    assert torch.equal(clean, poisoned)
