"""The two ends of the repair pass: all rows is full prefill, inline rows alone is pure reuse. Oracle: stock models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement, place_runs
from kvquilt.reading import Reader
from kvquilt.repair.operator import assemble, repair
from kvquilt.repair.presets import METHODS
from kvquilt.segment import CompiledSegment
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import FAMILIES, tiny
from tests.oracle import close, far, full_prefill, pure_reuse, random_ids, runs_of, stock

pytestmark = pytest.mark.usefixtures("nan_slots")
families = pytest.mark.parametrize("family", FAMILIES)

# documents shorter than, three times and equal to the window of 24; the longest is not last, where with three layers
# it would hide from the question all that stands before it
SHAPE, LENGTHS = "iAiBCi", (7, 11, 3, 72, 24, 9)
PREFIX = random_ids(7, 500)  # what runs_of puts first: documents right behind it are exact


@pytest.fixture(autouse=True)
def _everything_given_back() -> Iterator[None]:
    before = {family: tiny(family).pool.lent for family in FAMILIES}
    yield
    assert {family: tiny(family).pool.lent for family in FAMILIES} == before


def reader(model: LanguageModel, prefix: tuple[int, ...] = (), preamble: tuple[int, ...] = ()) -> Reader:
    return Reader(model, Store.open(None, 1 << 28), Isolated(prefix), preamble)


def read(
    read_with: Reader, placement: Placement, method: str, target: int | None = None, logits: int = 1
) -> tuple[torch.Tensor, Ledger]:
    ledger = Ledger()
    aimed = dataclasses.replace(placement, ranking=() if target is None else (target,))
    out, cache = read_with.read(aimed, METHODS[method], None, ledger, 0, logits)
    read_with.model.pool.release(cache)
    return out, ledger


def placed(model: LanguageModel, placement: Placement, writer: Isolated | None = None) -> SlotCache:
    """A cache with every document's isolated segment in its slots; the caller releases it."""
    return assemble(model, placement, compiled(model, placement, writer), placement.tokens)


def compiled(model: LanguageModel, placement: Placement, writer: Isolated | None = None) -> dict[int, CompiledSegment]:
    at = placement.documents()
    segments = (writer or Isolated()).compile(model, [placement.runs[i].ids for i in at])
    return {at[n]: segment for n, segment in segments}


def computed(model: LanguageModel, placement: Placement, *passes: list[range], logits: int = 1) -> torch.Tensor:
    """Logits after the given passes over a cache with all segments placed."""
    cache = placed(model, placement)
    try:
        for rows in passes:
            end = rows[-1].stop
            out = repair(model, cache, placement.ids[:end], rows, logits)
        return out
    finally:
        model.pool.release(cache)


@families
def test_all_rows_equal_full_prefill(family: str) -> None:
    placement = place_runs(runs_of(SHAPE, LENGTHS))
    out, ledger = read(reader(tiny(family)), placement, "full", logits=9)
    assert close(out, full_prefill(stock(family), placement.ids)[-9:])
    assert ledger.forward_tokens["read"] == placement.tokens


@families
def test_all_rows_through_the_masked_path_equal_full_prefill(family: str) -> None:
    """One row kept from an earlier pass makes the rest a gathered plan with masks instead of a plain prefill."""
    placement = place_runs(runs_of(SHAPE, LENGTHS))
    n = placement.tokens
    truth = full_prefill(stock(family), placement.ids)
    assert close(computed(tiny(family), placement, [range(1)], [range(1, n)], logits=n - 1), truth[1:])
    gathered = [range(40), range(60, n)]
    filled = [range(n)]
    assert close(computed(tiny(family), placement, filled, gathered, logits=n - 60), truth[60:])


@families
@pytest.mark.parametrize("prefix", [(), PREFIX], ids=["isolated", "shared-prefix"])
def test_inline_rows_alone_equal_pure_reuse(family: str, prefix: tuple[int, ...]) -> None:
    placement = place_runs(runs_of(SHAPE, LENGTHS))
    out, ledger = read(reader(tiny(family), prefix), placement, "none", logits=9)
    truth = pure_reuse(stock(family), placement, prefix)
    assert close(out, truth)
    assert far(full_prefill(stock(family), placement.ids)[-9:], truth) > 1e-2, "the case cannot tell reuse from prefill"
    assert ledger.forward_tokens["read"] == 7 + 3 + 9
    assert ledger.tokens[Provenance.RECOMPUTED] == 0


@families
def test_the_document_next_to_the_question_is_recomputed_in_place(family: str) -> None:
    placement = place_runs(runs_of(SHAPE, LENGTHS))
    out, ledger = read(reader(tiny(family)), placement, "retrieved-document", target=4, logits=9)
    assert close(out, pure_reuse(stock(family), placement, fresh=[4]))
    assert ledger.forward_tokens["read"] == 7 + 3 + 24 + 9


@families
def test_two_passes_equal_one(family: str) -> None:
    """A split at any logical position, documents first and question second, or the other rows first."""
    placement = place_runs(runs_of("iABi", (5, 13, 30, 6)))
    model, n = tiny(family), placement.tokens
    inline = [range(5), range(48, 54)]
    one = computed(model, placement, [range(5), range(18, n)])
    for split in (19, 30, 47, 50, n - 1):
        assert close(computed(model, placement, [range(5), range(18, split)], [range(split, n)]), one)
    assert close(computed(model, placement, [range(5), range(18, 48)], inline), one)
    assert not close(computed(model, placement, inline), one, 1e-3)


@families
def test_every_order_of_documents_equals_its_own_full_prefill(family: str) -> None:
    opening, a, b, c, question = runs_of("iABCi", (4, 9, 25, 31, 1))
    model, read_with = tiny(family), reader(tiny(family))
    for order in itertools.permutations((a, b, c)):
        placement = place_runs([opening, *order, question])
        out, _ = read(read_with, placement, "full")
        assert close(out, full_prefill(stock(family), placement.ids)[-1:])
        reused, ledger = read(read_with, placement, "none")
        assert close(reused, pure_reuse(stock(family), placement))
        again, second = read(read_with, placement, "none")
        assert torch.equal(again, reused)
        assert (ledger.forward_tokens["read"], second.forward_tokens["compile"]) == (5, 0)
    assert model.pool.lent == tiny(family).pool.lent


@families
def test_one_document_first_is_exact(family: str) -> None:
    placement = place_runs(runs_of("Ai", (72, 5)))
    out, ledger = read(reader(tiny(family)), placement, "none", logits=5)
    assert close(out, full_prefill(stock(family), placement.ids)[-5:])
    assert ledger.tokens[Provenance.EXACT] == 72
    assert ledger.tokens[Provenance.REUSED] == 0
    recomputed, second = read(reader(tiny(family)), placement, "retrieved-document", target=0, logits=5)
    assert close(recomputed, out)
    assert second.forward_tokens["read"] == 5, "an exact row was computed again"


@families
def test_a_document_behind_its_own_prefix_is_exact(family: str) -> None:
    """Prefix of odd length: logical positions, not indices, decide what is exact."""
    placement = place_runs(runs_of("iAi", (7, 40, 5)))
    read_with = reader(tiny(family), prefix=PREFIX, preamble=PREFIX)
    assert placement.runs[0].ids == PREFIX
    out, ledger = read(read_with, placement, "none", logits=5)
    assert close(out, full_prefill(stock(family), placement.ids)[-5:])
    assert ledger.tokens[Provenance.EXACT] == 47
    assert ledger.forward_tokens["read"] == 5
    moved = place_runs(runs_of("iBAi", (7, 12, 40, 5)))
    everything, _ = read(read_with, moved, "full", logits=5)
    assert close(everything, full_prefill(stock(family), moved.ids)[-5:])
    _, ledger = read(read_with, moved, "none", logits=5)
    assert (ledger.tokens[Provenance.EXACT], ledger.tokens[Provenance.REUSED]) == (19, 40)


@families
def test_adding_exact_rows_changes_nothing(family: str) -> None:
    placement = place_runs(runs_of("ABi", (17, 20, 6)))
    model = tiny(family)
    without = computed(model, placement, [range(37, 43)])
    assert close(computed(model, placement, [range(17), range(37, 43)]), without)
    assert close(computed(model, placement, [range(3, 9), range(37, 43)]), without)


@families
@pytest.mark.parametrize("prefix", [(), PREFIX], ids=["isolated", "shared-prefix"])
def test_layer_0_of_reused_rows_equals_fresh_rows(family: str, prefix: tuple[int, ...]) -> None:
    placement = place_runs(runs_of("iABCi", (7, 11, 24, 72, 4)))
    model, n = tiny(family), placement.tokens
    cache, fresh = placed(model, placement, Isolated(prefix)), model.pool.acquire(n)
    try:
        repair(model, fresh, placement.ids, [range(n)])
        for i in placement.documents():
            span = slice(placement.span(i).start, placement.span(i).stop)
            keys, truth = cache.slot_keys[0, 0, :, span], fresh.slot_keys[0, 0, :, span]
            assert float((keys - truth).norm() / truth.norm()) < 1e-5
            assert torch.allclose(cache.slot_values[0, 0, :, span], fresh.slot_values[0, 0, :, span], atol=1e-5)
    finally:
        model.pool.release(cache)
        model.pool.release(fresh)


@families
@pytest.mark.parametrize("offset", [1, 37, 800])
def test_shifting_the_whole_prompt_changes_nothing(family: str, offset: int) -> None:
    ids = random_ids(60, 3)
    model = tiny(family)
    cache = model.pool.acquire(60)
    try:
        plan = RowPlan(torch.arange(60), 60, offset=offset)
        out = model.forward(torch.tensor([ids]), plan, cache, 60)[0]
    finally:
        model.pool.release(cache)
    truth = full_prefill(stock(family), ids)
    # a sine of a large fp32 angle is only good to the angle's own rounding; the stock model drifts as far
    assert far(out, truth) <= max(1e-4, 4 * far(full_prefill(stock(family), ids, offset), truth))
    assert far(out, truth) < 2e-3


@families
def test_rows_are_counted_on_the_model_and_in_the_ledger_alike(family: str) -> None:
    """An independent hook on every decoder layer sees the rows that the ledger states, by kind and per layer."""
    model = tiny(family)
    layers = model.hf.base_model.layers
    seen = [0] * len(layers)

    def count(index: int) -> object:
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            seen[index] += hidden.shape[0] * hidden.shape[1]

        return layers[index].register_forward_pre_hook(hook, with_kwargs=True)

    handles = [count(i) for i in range(len(layers))]
    try:
        placement = place_runs(runs_of("iABi", (5, 20, 20, 3)))
        read_with = reader(model)
        _, first = read(read_with, placement, "none")
        assert first.forward_tokens == {"compile": 40, "probe": 0, "read": 8, "decode": 0}
        assert seen == [48] * len(layers)
        _, second = read(read_with, placement, "retrieved-document", target=2)
        assert second.forward_tokens == {"compile": 0, "probe": 0, "read": 28, "decode": 0}
        assert seen == [76] * len(layers)
        assert first.token_layers + second.token_layers == sum(seen)
    finally:
        for handle in handles:
            handle.remove()  # type: ignore[attr-defined]


def test_a_recycled_buffer_of_a_longer_request_leaves_no_trace() -> None:
    model = tiny("gemma3")
    long, short = place_runs(runs_of("iABi", (5, 90, 90, 5))), place_runs(runs_of("iCi", (5, 30, 4), seed=1))
    alone, _ = read(reader(model), short, "none", logits=4)
    read(reader(model), long, "none")
    behind, _ = read(reader(model), short, "none", logits=4)
    assert torch.equal(alone, behind)


def test_a_prompt_that_ends_with_a_document_predicts_what_follows_it() -> None:
    """The last row is computed though nothing inline stands there: its logits are the ones asked for."""
    for shape, lengths in (("iAB", (5, 12, 9)), ("A", (12,)), ("AB", (12, 9))):
        placement = place_runs(runs_of(shape, lengths))
        out, ledger = read(reader(tiny()), placement, "none")
        n = placement.tokens
        truth = computed(tiny(), placement, [*[placement.span(0)] * (shape[0] == "i"), range(n - 1, n)])
        assert close(out, truth)
        assert sum(ledger.tokens.values()) == n
        assert ledger.tokens[Provenance.RECOMPUTED] == 1


def test_the_hook_counts_padding_free_rows_only_once() -> None:
    model, counter = tiny(), RowCounter()
    cache = model.pool.acquire(10)
    model.forward(torch.tensor([random_ids(10, 1)]), RowPlan(torch.arange(10), 10), cache, 1, counter)
    model.pool.release(cache)
    assert (counter.rows, counter.token_layers) == (10, 30)
