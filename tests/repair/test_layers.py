"""Plans whose rows differ by layer, against a stock model that takes one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.model.counter import RowCounter
from kvquilt.model.rows import RowPlan
from kvquilt.placement import place_runs
from kvquilt.repair.plan import counts_by_layer, cut, row_plan
from kvquilt.repair.scene import Scene, joined
from kvquilt.repair.selector import Choice
from tests.models import tiny
from tests.oracle import close, full_prefill, pure_reuse, runs_of, stock
from tests.repair.passes import FAMILIES, computed, document_slots, inline_spans, passed, plan_of, same_slots
from tests.repair.tokenwise import stored, walk

LAYERS = 3
PLACEMENT = place_runs(runs_of("iABi", (3, 17, 15, 4)))  # longer than gemma3's window of 24
families = pytest.mark.parametrize("family", FAMILIES)
few = settings(max_examples=8, deadline=None)
chosen = st.sets(st.integers(0, 31))  # of 32 document slots


def computed_by(sets: list[set[int]]) -> torch.Tensor:
    return computed(PLACEMENT, sets)


def equals_the_walk(family: str, rows: torch.Tensor) -> bool:
    truth, slots = walk(stock(family), PLACEMENT.ids, stored(stock(family), PLACEMENT), rows)
    out, ours = passed(tiny(family), PLACEMENT, [plan_of(rows)], len(truth))
    return close(out, torch.stack(list(truth.values()))) and same_slots(ours, slots)


def test_the_walk_itself_equals_full_prefill_and_pure_reuse() -> None:
    for family in FAMILIES:
        slots = stored(stock(family), PLACEMENT)
        every, _ = walk(stock(family), PLACEMENT.ids, slots, computed_by([set(range(32))] * LAYERS))
        assert close(torch.stack(list(every.values())), full_prefill(stock(family), PLACEMENT.ids))
        inline, _ = walk(stock(family), PLACEMENT.ids, slots, computed_by([set()] * LAYERS))
        assert close(torch.stack(list(inline.values()))[-4:], pure_reuse(stock(family), PLACEMENT))


@families
@few
@given(st.tuples(chosen, chosen, chosen))
def test_rows_that_leave_keep_their_old_keys_and_later_rows_attend_to_them(
    family: str, sets: tuple[set[int], ...]
) -> None:
    first, second, third = sets
    assert equals_the_walk(family, computed_by([first | second | third, second | third, third]))


@families
@few
@given(st.tuples(chosen, chosen, chosen))
def test_rows_may_sit_out_any_layer(family: str, sets: tuple[set[int], ...]) -> None:
    assert equals_the_walk(family, computed_by(list(sets)))


@families
@pytest.mark.parametrize("empty", range(LAYERS))
def test_a_layer_that_no_row_passes(family: str, empty: int) -> None:
    rows = computed_by([set(range(5, 12))] * LAYERS)
    rows[empty] = False
    slots = stored(stock(family), PLACEMENT)
    inline = joined(inline_spans(PLACEMENT))
    ids = PLACEMENT.ids

    def fill(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:  # inline rows leave nothing there either
        for one in pairs[empty]:
            one[:, inline] = 0.25

    fill(slots)
    truth, after = walk(stock(family), ids, slots, rows)
    out, ours = passed(
        tiny(family), PLACEMENT, [plan_of(rows)], len(truth),
        change=lambda c: fill([(k[0], v[0]) for k, v in zip(c.slot_keys, c.slot_values, strict=True)]),
    )  # fmt: skip
    assert close(out, torch.stack(list(truth.values())))
    assert same_slots(ours, after)


def test_a_plan_that_ends_in_a_layer_nobody_passes_ends_there() -> None:
    rows = computed_by([set(range(5, 12))] * LAYERS)
    rows[1] = False
    _, before = passed(tiny(), PLACEMENT, [plan_of(rows[:1].expand(LAYERS, -1), until=0)], 0)
    plan, counter = plan_of(rows, until=1), RowCounter()
    _, slots = passed(tiny(), PLACEMENT, [plan], 0, counter=counter)
    assert counter.token_layers == int(rows[0].sum())
    for (k, v), (old_k, old_v) in zip(slots, before, strict=True):
        assert torch.equal(k.nan_to_num(), old_k.nan_to_num())
        assert torch.equal(v.nan_to_num(), old_v.nan_to_num())


def test_a_plan_that_writes_rows_which_left_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is worth something: a pass that goes on with all rows fails it."""
    rows = computed_by([set(range(20)), set(range(4)), set()])
    assert equals_the_walk("llama", rows)
    monkeypatch.setattr(RowPlan, "enter", lambda self, layer: None)
    monkeypatch.setattr(RowPlan, "walks", False)
    assert not equals_the_walk("llama", rows)


# from a choice to a plan


def chosen_plan(choice: Choice, rows: int) -> RowPlan:
    inline = joined(inline_spans(PLACEMENT))
    return row_plan(inline, LAYERS, choice, choice.ranking[:rows], PLACEMENT.tokens, None, None)


def charge(plan: RowPlan, inline: int) -> int:
    """Document token-layers of a plan, by its own words."""
    return sum(len(plan.active.get(n, plan.rows)) - inline for n in range(LAYERS))


@families
@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_a_band_that_ends_early(family: str, last: int) -> None:
    ranking = document_slots(PLACEMENT)[torch.randperm(32, generator=torch.Generator().manual_seed(last))]
    plan = chosen_plan(Choice(ranking, last=last), 11)
    wanted = set((torch.searchsorted(document_slots(PLACEMENT), ranking[:11])).tolist())
    rows = computed_by([wanted if n < last else set() for n in range(LAYERS)])
    truth, slots = walk(stock(family), PLACEMENT.ids, stored(stock(family), PLACEMENT), rows)
    out, ours = passed(tiny(family), PLACEMENT, [plan])
    assert close(out[-1], truth[PLACEMENT.tokens - 1])
    assert same_slots(ours, slots)


@families
@few
@given(st.integers(1, 2), st.sets(st.integers(0, 31), min_size=1), st.randoms(use_true_random=False))
def test_rows_that_skip_the_first_layers_enter_with_the_given_states(
    family: str, first: int, resumed: set[int], chance: object
) -> None:
    """Some of the rows resume in layer `first`, the others start at layer 0; whatever the states are."""
    generator = torch.Generator().manual_seed(chance.getrandbits(30))  # type: ignore[attr-defined]
    slots = document_slots(PLACEMENT)
    ranking = slots[torch.randperm(32, generator=generator)][:14]
    entering = slots[sorted(resumed)]
    states = torch.randn(len(entering), 64, generator=generator)
    plan = chosen_plan(Choice(ranking, first=first, entering=(entering, states)), 14)
    rows = set(torch.searchsorted(slots, ranking.sort().values).tolist())
    rows = computed_by([rows - resumed if n < first else rows for n in range(LAYERS)])
    given_states = {int(s): x for s, x in zip(entering, states, strict=True) if s in ranking}
    truth, after = walk(
        stock(family), PLACEMENT.ids, stored(stock(family), PLACEMENT), rows, entering=(first, given_states)
    )
    out, ours = passed(tiny(family), PLACEMENT, [plan], len(truth))
    assert close(out, torch.stack(list(truth.values())))
    assert same_slots(ours, after)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2), st.integers(1, 3), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(0, 120),
    st.sets(st.integers(0, 31)), st.booleans(),
)  # fmt: skip
def test_the_plan_of_a_cut_never_charges_more_than_is_left(
    first: int, depth: int, decline: float, left: int, resumed: set[int], resumes: bool
) -> None:
    """Whatever the band, the decline and the rows that resume: the plan's own rows add up to at most the budget."""
    last = first + depth if first + depth < LAYERS else None
    slots = document_slots(PLACEMENT)
    entering = (slots[sorted(resumed)], torch.zeros(len(resumed), 64)) if resumes and resumed else None
    choice = Choice(slots.flip(0), first=first, last=last, decline=decline, entering=entering)
    scene = Scene(tiny(), PLACEMENT, PLACEMENT.documents(), inline_spans(PLACEMENT))
    kept = cut(choice, (), scene, left)
    assert charge(chosen_plan(choice, len(kept)), 7) <= left
    if decline:
        counts = counts_by_layer(choice, len(kept), LAYERS)
        assert list(counts.values()) == sorted(counts.values(), reverse=True)
