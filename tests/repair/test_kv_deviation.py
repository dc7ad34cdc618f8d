"""Rows by deviation at layer 1: scores are those of a stock model, and what is charged is what passed the layers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger, Spending
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import weights_digest
from kvquilt.model.rows import RowPlan
from kvquilt.placement import Placement, place_runs
from kvquilt.reading import Reader
from kvquilt.repair.budget import Budget
from kvquilt.repair.kv_deviation import KVDeviation
from kvquilt.repair.operator import assemble
from kvquilt.repair.presets import Method, find_method
from kvquilt.repair.scene import Scene
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import build, tiny
from tests.oracle import close, full_prefill, runs_of, stock
from tests.repair.passes import inline_spans, placed
from tests.repair.tokenwise import Slots, stored, walk
from tests.tokenizers import chatml_tokenizer

PLACEMENT = place_runs(runs_of("iABiCi", (3, 17, 15, 2, 30, 4)))  # longer than gemma3's window of 24
INLINE = 9
families = pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
parts = pytest.mark.parametrize("of", ["values", "keys", "both"])


@functools.cache
def deep() -> LanguageModel:
    hf = build("llama", num_hidden_layers=6)
    return LanguageModel.wrap(hf, chatml_tokenizer(), "tiny-deep", weights_digest(hf))


def fresh(family: str, placement: Placement) -> Slots:
    whole = place_runs([dataclasses.replace(placement.runs[0], ids=placement.ids, document=None)])
    computed = torch.ones(3, placement.tokens, dtype=torch.bool)
    return walk(stock(family), placement.ids, stored(stock(family), whole), computed)[1]


def ranking_of(model: LanguageModel, placement: Placement, selector: KVDeviation) -> torch.Tensor:
    cache = placed(model, placement)
    try:
        return selector.choose(
            Scene(model, placement, placement.documents(), inline_spans(placement), cache=cache)
        ).ranking
    finally:
        model.pool.release(cache)


def method(budget: int | None, **fields: Any) -> Method:
    given = None if budget is None else Budget(token_layers=budget)
    return dataclasses.replace(find_method("cacheblend"), selector=KVDeviation(**fields), budget=given)


def read(model: LanguageModel, placement: Placement, how: Method) -> tuple[torch.Tensor, Ledger]:
    reader, ledger = Reader(model, Store.open(None, 1 << 28), Isolated(), ()), Ledger()
    out, cache = reader.read(placement, how, None, ledger, 0)
    model.pool.release(cache)
    return out, ledger


def spent(ledger: Ledger) -> Spending:
    assert ledger.spending is not None
    return ledger.spending


@contextmanager
def passes(model: LanguageModel) -> Iterator[dict[str, int]]:
    """Rows that pass the query projections, and those that pass the rest of a layer too, by hooks of the test's own."""
    seen = {"projected": 0, "finished": 0}

    def count(name: str) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            seen[name] += args[0].shape[0] * args[0].shape[1]

        return hook

    handles = [x.self_attn.q_proj.register_forward_pre_hook(count("projected")) for x in model.hf.base_model.layers]
    handles += [x.mlp.register_forward_pre_hook(count("finished")) for x in model.hf.base_model.layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@families
@parts
def test_rows_rank_by_their_squared_change_at_layer_1(family: str, of: str) -> None:
    before, after = stored(stock(family), PLACEMENT)[1], fresh(family, PLACEMENT)[1]
    change = [(a - b).double().square().sum((0, 2)) for a, b in zip(after, before, strict=True)]
    scores = {"keys": change[0], "values": change[1], "both": change[0] + change[1]}[of]
    rows = torch.cat([torch.arange(s.start, s.stop) for s in map(PLACEMENT.span, PLACEMENT.documents())])
    expected = rows[scores[rows].argsort(descending=True, stable=True)]
    ranking = ranking_of(tiny(family), PLACEMENT, KVDeviation(of=of))  # type: ignore[arg-type]
    assert torch.allclose(scores[ranking], scores[expected], rtol=1e-3, atol=1e-6 * float(scores[rows].max()))
    assert ranking[:10].tolist() == expected[:10].tolist()


@families
def test_layers_0_and_1_are_fresh_for_all_rows_and_later_ones_for_the_chosen(family: str) -> None:
    """The answer of a cut equals a walk of the chosen rows over slots whose first two layers are full prefill's."""
    ranking = ranking_of(tiny(family), PLACEMENT, KVDeviation())
    slots = [*fresh(family, PLACEMENT)[:2], stored(stock(family), PLACEMENT)[2]]
    computed = torch.ones(3, PLACEMENT.tokens, dtype=torch.bool)
    computed[:, ranking[11:]] = False
    truth, _ = walk(stock(family), PLACEMENT.ids, slots, computed)
    selector, model = KVDeviation(), tiny(family)
    least = selector.least(Scene(model, PLACEMENT, PLACEMENT.documents(), inline_spans(PLACEMENT)))
    out, ledger = read(model, PLACEMENT, method(least + 11 * 2))
    assert spent(ledger).rows == 11
    assert close(out[0], truth[PLACEMENT.tokens - 1])
    assert not close(out[0], full_prefill(stock(family), PLACEMENT.ids)[-1])


@families
@pytest.mark.parametrize("gradual", [0.0, 0.5])
def test_the_least_budget_buys_the_check_and_nothing_else(family: str, gradual: float) -> None:
    model, selector = tiny(family), KVDeviation(gradual=gradual)
    least = selector.least(Scene(model, PLACEMENT, PLACEMENT.documents(), inline_spans(PLACEMENT)))
    with passes(model) as seen:
        _, ledger = read(model, PLACEMENT, method(least, gradual=gradual))
    assert spent(ledger) == Spending(62, 3, least, rows=0, probe=least, repair=0, first=1)
    compiled = ledger.forward_tokens["compile"]
    unfinished = seen["projected"] - seen["finished"] - compiled  # compiling leaves its last layer, too
    finished = seen["finished"] - 2 * compiled
    assert finished + math.ceil(unfinished * model.projection_share) - INLINE * 3 == least
    with pytest.raises(InputError, match=f"the least possible is {least}"):
        read(model, PLACEMENT, method(least - 1, gradual=gradual))


@pytest.mark.parametrize("gradual", [0.0, 0.5, 1.0])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 500))
def test_no_budget_is_exceeded_and_little_of_it_is_left(gradual: float, more: int) -> None:
    model, selector = deep(), KVDeviation(gradual=gradual)
    allowed = more + selector.least(Scene(model, PLACEMENT, PLACEMENT.documents(), inline_spans(PLACEMENT)))
    with passes(model) as seen:
        _, ledger = read(model, PLACEMENT, method(allowed, gradual=gradual))
    compiled = ledger.forward_tokens["compile"]
    unfinished = seen["projected"] - seen["finished"] - compiled
    finished = seen["finished"] - 5 * compiled
    charged = finished + math.ceil(unfinished * model.projection_share) - INLINE * 6
    assert spent(ledger).charged == charged
    assert charged <= allowed
    if spent(ledger).rows < 62:
        assert charged > allowed - 2 * 5, "a row of five layers still fitted"


@families
@pytest.mark.parametrize("gradual", [0.0, 0.5])
def test_without_a_budget_everything_is_computed(family: str, gradual: float) -> None:
    out, ledger = read(tiny(family), PLACEMENT, method(None, gradual=gradual))
    assert close(out, full_prefill(stock(family), PLACEMENT.ids)[-1:])
    assert spent(ledger).rows == 62


def test_gradual_filtering_keeps_what_deviates_most_in_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, selector = deep(), KVDeviation(gradual=0.8)
    hf = build("llama", num_hidden_layers=6)
    ranking = ranking_of(model, PLACEMENT, selector)
    rows: dict[int, list[int]] = {}
    enter = RowPlan.enter

    def noted(self: RowPlan, layer: int) -> torch.Tensor | None:
        out = enter(self, layer)
        if self.until is None:
            rows[layer] = self.current.slots.tolist()
        return out

    monkeypatch.setattr(RowPlan, "enter", noted)
    least = selector.least(Scene(model, PLACEMENT, PLACEMENT.documents(), inline_spans(PLACEMENT)))
    read(model, PLACEMENT, method(least + 20 * 5, gradual=0.8))
    inline = {s for span in inline_spans(PLACEMENT) for s in span}
    chosen = {n: set(slots) - inline for n, slots in rows.items()}
    assert {n: len(c) for n, c in chosen.items()} == {0: 0, 1: 36, 2: 28, 3: 20, 4: 12, 5: 4}
    assert chosen[1] == set(ranking[:36].tolist())
    assert chosen[2] == set(ranking[:28].tolist())
    before = stored(hf, PLACEMENT)
    computed = torch.ones(6, PLACEMENT.tokens, dtype=torch.bool)
    whole = walk(hf, PLACEMENT.ids, [(k.nan_to_num(), v.nan_to_num()) for k, v in before], computed)[1]
    for n in range(6):
        computed[n] = torch.isin(torch.arange(PLACEMENT.tokens), torch.tensor(rows[max(n, 1)]))
    after = walk(hf, PLACEMENT.ids, [*whole[:2], *before[2:]], computed)[1]
    for n in (2, 3, 4):
        change = (after[n][1] - before[n][1]).square().sum((0, 2))
        alive = torch.tensor(sorted(chosen[n]))
        best = alive[change[alive].argsort(descending=True)[: len(chosen[n + 1])]]
        assert chosen[n + 1] == set(best.tolist()), f"layer {n}"
    assert chosen[3] != set(ranking[:20].tolist()), "the layers agree; this test would pass without filtering"


@families
def test_an_exact_prefix_in_front_changes_nothing_in_the_ranking(family: str) -> None:
    """The opening compiled and placed, or inline and computed by the check: the same rows in the same order."""
    model = tiny(family)
    documents = PLACEMENT.documents()
    segments = dict(Isolated().compile(model, [PLACEMENT.runs[i].ids for i in (0, *documents)]))
    at = {run: segments[n] for n, run in enumerate((0, *documents))}
    cache = assemble(model, PLACEMENT, at, PLACEMENT.tokens)
    try:
        scene = Scene(model, PLACEMENT, documents, inline_spans(PLACEMENT)[1:], cache=cache)
        ranking = KVDeviation().choose(scene).ranking
    finally:
        model.pool.release(cache)
    assert torch.equal(ranking, ranking_of(model, PLACEMENT, KVDeviation()))


def test_a_model_of_one_layer_has_nothing_to_check() -> None:
    hf = build("llama", num_hidden_layers=1)
    model = LanguageModel.wrap(hf, chatml_tokenizer(), "tiny-one", weights_digest(hf))
    out, ledger = read(model, PLACEMENT, method(3))
    assert close(out, full_prefill(build("llama", num_hidden_layers=1), PLACEMENT.ids)[-1:])
    assert (spent(ledger).probe, spent(ledger).repair) == (0, 3)


def test_a_prompt_that_ends_with_a_document_and_one_without_any() -> None:
    ends = place_runs(runs_of("iAB", (3, 9, 8)))
    out, ledger = read(tiny(), ends, method(None))
    assert close(out, full_prefill(stock(), ends.ids)[-1:])
    least = spent(read(tiny(), ends, method(10**6))[1]).probe
    _, ledger = read(tiny(), ends, method(least + 2))
    assert spent(ledger).charged <= least + 2
    alone = place_runs(runs_of("i", (6,)))
    out, ledger = read(tiny(), alone, method(0))
    assert close(out, full_prefill(stock(), alone.ids)[-1:])
    assert spent(ledger).charged == 0


def test_settings_are_checked() -> None:
    assert find_method("cacheblend:of=keys,gradual=0.3").selector == KVDeviation("keys", 0.3)
    for written, rule in (("of=hidden", "values, keys or both"), ("gradual=1.5", "between 0 and 1")):
        with pytest.raises(InputError, match=rule):
            find_method(f"cacheblend:{written}")
