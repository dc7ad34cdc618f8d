"""The mean shift: what was planted is taken back, what is not to be touched is not, and the sum is the formula's."""

from __future__ import annotations

import functools

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan, SlotView, Watcher
from kvquilt.placement import place_runs
from kvquilt.prompt import Run
from kvquilt.reading import Reader
from kvquilt.repair.mean_shift import MeanShift
from kvquilt.repair.operator import repair
from kvquilt.repair.plan import row_plan
from kvquilt.repair.presets import METHODS, find_method
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice
from kvquilt.repair.spread import Spread
from kvquilt.segment import CompiledSegment
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import tiny
from tests.oracle import close, full_prefill, random_ids, runs_of, stock
from tests.repair.passes import FAMILIES, placed

EVERY = (*FAMILIES, "llama-yarn", "phi3-partial")
PLACEMENT = place_runs(runs_of("iABCi", (5, 18, 27, 9, 4)))  # longer than gemma3's window of 24
pytestmark = pytest.mark.usefixtures("nan_slots")
Slots = tuple[torch.Tensor, torch.Tensor]  # keys and values [layers, kv_heads, tokens, dim]


def turn(model: LanguageModel, keys: torch.Tensor, positions: torch.Tensor, sign: int) -> torch.Tensor:
    """Keys ``[layers, heads, tokens, dim]`` turned by their positions: complex numbers, in fp64."""
    out = keys.double().clone()
    for layer, table in enumerate(model.capability.tables):
        assert table is not None
        half = len(table.inv_freq)
        angle = sign * positions.double()[:, None] * table.inv_freq.double()
        pairs = torch.complex(out[layer, ..., :half], out[layer, ..., half : 2 * half])
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        out[layer, ..., :half], out[layer, ..., half : 2 * half] = pairs.real, pairs.imag
    return out


def scene_of(model: LanguageModel, spendable: tuple[int, ...] = (1, 2, 3)) -> Scene:
    inline = [PLACEMENT.span(i) for i, run in enumerate(PLACEMENT.runs) if run.document is None]
    return Scene(model, PLACEMENT, spendable, inline)


def run(
    model: LanguageModel, before: Slots, chosen: torch.Tensor, spendable: tuple[int, ...] = (1, 2, 3)
) -> tuple[torch.Tensor, Slots, RowCounter]:
    """The pass over `chosen` and the inline rows, from slots `before`: last logits, slots afterwards."""
    scene, n, counter = scene_of(model, spendable), PLACEMENT.tokens, RowCounter()
    watcher = MeanShift().watcher(scene, chosen)
    plan = row_plan(scene.inline_slots, scene.layers, Choice(chosen), chosen, n, None, watcher)
    with model.pool.lend(n) as cache:
        cache.slot_keys[:, 0, :, :n], cache.slot_values[:, 0, :, :n] = before
        out = repair(model, cache, PLACEMENT.ids, plan, 1, counter)
        return out, (cache.slot_keys[:, 0, :, :n].clone(), cache.slot_values[:, 0, :, :n].clone()), counter


@functools.cache
def fresh(family: str) -> Slots:
    """Keys and values of full prefill."""
    model, n = tiny(family), PLACEMENT.tokens
    with model.pool.lend(n) as cache:
        repair(model, cache, PLACEMENT.ids, [range(n)])
        return cache.slot_keys[:, 0, :, :n].clone(), cache.slot_values[:, 0, :, :n].clone()


@functools.cache
def reused(family: str) -> Slots:
    """Keys and values of documents encoded alone; inline slots are NaN."""
    model, n = tiny(family), PLACEMENT.tokens
    cache = placed(model, PLACEMENT)
    out = cache.slot_keys[:, 0, :, :n].clone(), cache.slot_values[:, 0, :, :n].clone()
    model.pool.release(cache)
    return out


def rows_in(run_index: int) -> torch.Tensor:
    span = PLACEMENT.span(run_index)
    return torch.arange(span.start, span.stop)


def three_each() -> torch.Tensor:
    return torch.cat([rows_in(i)[[0, 4, 7]] for i in (1, 2, 3)])


@pytest.mark.parametrize("family", EVERY)
def test_a_planted_shift_is_taken_back(family: str) -> None:
    """Documents whose unrotated keys and values are all off by one vector per head, layer and document."""
    model, (keys, values) = tiny(family), fresh(family)
    generator = torch.Generator().manual_seed(3)
    off = [torch.zeros_like(keys, dtype=torch.float64), torch.zeros_like(values, dtype=torch.float64)]
    for i in (1, 2, 3):
        for part in off:
            shape = (part.shape[0], part.shape[1], 1, part.shape[3])
            part[1:, :, rows_in(i)] = torch.randn(shape, generator=generator, dtype=torch.float64)[1:]
    positions = torch.arange(PLACEMENT.tokens)
    planted = (keys + turn(model, off[0], positions, 1).float(), values + off[1].float())
    truth = full_prefill(stock(family), PLACEMENT.ids)[-1:]
    out, slots, _ = run(model, planted, three_each())
    assert close(out, truth)
    for measured, right, wrong in zip(slots, (keys, values), planted, strict=True):
        assert float((measured - right).abs().max() / right.abs().max()) < 1e-4
        assert float((wrong - right).abs().max() / right.abs().max()) > 1e-2, "nothing was planted"
    uncorrected, _, _ = run(model, planted, three_each(), spendable=())
    assert not close(uncorrected, truth)


@pytest.mark.parametrize("family", EVERY)
def test_the_rest_of_a_document_moves_by_the_mean_of_its_computed_rows(family: str) -> None:
    model, before = tiny(family), reused(family)
    chosen = torch.cat((rows_in(1)[[2, 3, 11]], rows_in(2)[[20]]))
    _, after, _ = run(model, before, chosen)
    positions = torch.arange(PLACEMENT.tokens)
    for part, (old, new) in enumerate(zip(before, after, strict=True)):
        old, new = old.double(), new.double()
        if part == 0:
            old, new = turn(model, old, positions, -1), turn(model, new, positions, -1)
        for i, those in ((1, rows_in(1)[[2, 3, 11]]), (2, rows_in(2)[[20]])):
            others = rows_in(i)[~torch.isin(rows_in(i), those)]
            mean = (new[1:, :, those] - old[1:, :, those]).mean(2, keepdim=True)
            expected = old[1:, :, others] + mean
            assert float((new[1:, :, others] - expected).abs().max() / expected.abs().max()) < 1e-5
            assert float(mean.abs().max()) > 1e-2, "nothing moves here"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_alone(family: str) -> None:
    """Layer 0, a document of which nothing is computed, an exact one even if a row of it is computed."""
    before = reused(family)
    chosen = torch.cat((rows_in(1)[[2]], rows_in(2)[[0, 9]]))
    _, after, counter = run(tiny(family), before, chosen, spendable=(2, 3))
    untouched = torch.cat((rows_in(1)[~torch.isin(rows_in(1), chosen)], rows_in(3)))
    others = rows_in(2)[~torch.isin(rows_in(2), chosen)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:, :, untouched], old[:, :, untouched])
        assert torch.equal(new[0][:, others], old[0][:, others])
        assert not torch.equal(new[1][:, others], old[1][:, others])
    assert counter.token_layers == 3 * (3 + 9), "a correction passes no rows"


@pytest.mark.parametrize("family", FAMILIES)
def test_with_all_rows_computed_nothing_is_left_to_correct(family: str) -> None:
    reader, ledger = Reader(tiny(family), Store.open(None, 1 << 28), Isolated(), ()), Ledger()
    out, cache = reader.read(PLACEMENT, find_method("agentkvshift:100%"), None, ledger, 0)
    reader.model.pool.release(cache)
    assert close(out, full_prefill(stock(family), PLACEMENT.ids)[-1:])
    assert ledger.tokens[Provenance.CORRECTED] == 0


def test_the_preset_charges_its_rows_and_says_what_was_corrected() -> None:
    prefix = random_ids(5, 77)
    placement = place_runs([Run(prefix), *PLACEMENT.runs[1:]])
    store = Store.open(None, 1 << 28)
    reader = Reader(tiny(), store, Isolated(prefix), ())
    results = []
    for name in ("agentkvshift", "agentkvshift", "spread", "agentkvshift:3"):
        ledger = Ledger()
        out, cache = reader.read(placement, find_method(name), None, ledger, 0)
        reader.model.pool.release(cache)
        results.append((out, ledger))
    (first, _), (again, ledger), (spread, plain), (_, least) = results
    assert torch.equal(first, again), "what is stored has not moved"
    assert not torch.equal(first, spread)
    assert METHODS["agentkvshift"].selector == Spread()
    assert ledger.spending == plain.spending
    assert ledger.spending is not None
    assert (ledger.spending.tokens, ledger.spending.allowed, ledger.spending.rows) == (36, 16, 5)
    assert ledger.spending.charged == 15
    held = {k: v for k, v in ledger.tokens.items() if v}
    expected = {Provenance.EXACT: 18, Provenance.CORRECTED: 31, Provenance.RECOMPUTED: 5, Provenance.INLINE: 9}
    assert held == expected
    # one row: its document is corrected, the other is not and does not say so
    assert [d.provenance for d in least.documents] == [Provenance.EXACT, Provenance.CORRECTED, Provenance.REUSED]


def test_stored_segments_never_change() -> None:
    model = tiny()
    segments: dict[int, CompiledSegment] = {}
    documents = PLACEMENT.documents()
    for n, segment in Isolated().compile(model, [PLACEMENT.runs[i].ids for i in documents]):
        segments[documents[n]] = segment
    store = Store.open(None, 1 << 28)
    reader = Reader(model, store, Isolated(), ())
    for _ in range(2):
        _, cache = reader.read(PLACEMENT, METHODS["agentkvshift"], None, Ledger(), 0)
        model.pool.release(cache)
    assert store.memory is not None
    entries = {entry.segment.ids: entry.segment for entry in store.memory._entries.values()}
    assert len(entries) == 3
    for segment in segments.values():
        assert torch.equal(entries[segment.ids].keys, segment.keys)
        assert torch.equal(entries[segment.ids].values, segment.values)


def written(watcher: Watcher, plan: RowPlan, stored: list[torch.Tensor], new: list[torch.Tensor]) -> list[torch.Tensor]:
    slots = [part.clone() for part in stored]
    watcher.writes(1, plan, (slots[0], slots[1]), (new[0], new[1]))
    return slots


def test_half_precision_is_cast_once_and_positions_are_the_views() -> None:
    model, n = tiny(), PLACEMENT.tokens
    chosen = three_each()
    watcher = MeanShift().watcher(scene_of(model), chosen)
    assert watcher is not None
    generator = torch.Generator().manual_seed(5)
    wide = [torch.randn(1, 2, n, 16, generator=generator).bfloat16() for _ in range(2)]
    new = [torch.randn(1, 2, len(chosen), 16, generator=generator).bfloat16() for _ in range(2)]
    plan = RowPlan(chosen.sort().values, n)
    half = written(watcher, plan, wide, new)
    full = written(watcher, plan, [part.float() for part in wide], [part.float() for part in new])
    for a, b, old in zip(half, full, wide, strict=True):
        assert torch.equal(a, b.bfloat16())
        assert not torch.equal(a, old)
    # a common offset of all positions cancels; positions in another order do not
    for view, same in ((SlotView(torch.arange(n) + 100), True), (SlotView(torch.arange(n).flip(0)), False)):
        again = MeanShift().watcher(scene_of(model), chosen)
        assert again is not None
        moved = written(again, RowPlan(plan.rows, n, view=view), [p.float() for p in wide], [p.float() for p in new])
        assert torch.allclose(moved[0], full[0], atol=1e-4) == same
        assert torch.equal(moved[1], full[1])


def test_dropped_rows_are_refused() -> None:
    model = tiny()
    watcher = MeanShift().watcher(scene_of(model), three_each())
    assert watcher is not None
    some = [torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)]
    with pytest.raises(InputError, match=r"correction: .*dropped"):
        written(watcher, RowPlan(torch.arange(8), 8), some, some)


def test_without_computed_rows_nobody_watches() -> None:
    assert MeanShift().watcher(scene_of(tiny()), torch.empty(0, dtype=torch.int64)) is None
