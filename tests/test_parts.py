"""Trained parts of a forward: on for one block, then off without a trace; soft tokens are never silently missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvquilt.endpoints import check_endpoints
from kvquilt.errors import IntegrityError
from kvquilt.model.intact import additions
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import SOFT, Adapter, Parts, embedded, parts_of, soft_ids
from kvquilt.model.rows import RowPlan
from tests.engines import documents, make_engine
from tests.models import FAMILIES, build, tiny
from tests.oracle import random_ids
from tests.writers.trained import random_parts, random_writer

families = pytest.mark.parametrize("family", FAMILIES)
IDS = random_ids(23, 11)


@pytest.fixture(autouse=True)
def _nothing_is_left_on_any_model() -> Iterator[None]:
    yield
    for family in FAMILIES:
        model = tiny(family)
        assert additions(model) == []
        assert not any(vars(module)["_forward_hooks"] for module in model.hf.modules())


def adapter(model: LanguageModel, seed: int = 0, targets: tuple[str, ...] = ()) -> Adapter:
    made = parts_of(random_parts(model, 3, 0, 0, seed, targets), 6.0).adapter
    assert made is not None
    return made


@torch.inference_mode()
def raw(model: LanguageModel) -> torch.Tensor:
    """Logits of the model as it is now, past everything of kvquilt's but its attention."""
    return model.hf(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].float()


def planned(model: LanguageModel, parts: Parts | None = None, ids: tuple[int, ...] = IDS) -> torch.Tensor:
    with model.pool.lend(len(ids)) as cache:
        cache.parts = parts or Parts()
        return model.forward(torch.tensor([ids]), RowPlan(torch.arange(len(ids)), len(ids)), cache, len(ids))[0]


@families
def test_an_adapter_adds_its_products_and_goes(family: str) -> None:
    model = tiny(family)
    before, it = raw(model), adapter(model)
    with it.on(model.hf.base_model):
        inside = raw(model)
    merged = build(family)
    with torch.no_grad():
        for name, (a, b) in it.pairs.items():
            merged.base_model.get_parameter(f"{name}.weight").add_(it.scaling * b @ a)
        truth = merged(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].float()
    assert torch.allclose(inside, truth, atol=1e-3)
    assert (inside - before).abs().max() > 0.1, "the adapter changes nothing, so nothing was tested"
    assert torch.equal(raw(model), before)


@families
def test_a_forward_has_the_parts_of_its_cache_and_the_next_has_not(family: str) -> None:
    model = tiny(family)
    before, plain = raw(model), planned(model)
    with_parts = planned(model, Parts(adapter(model)))
    assert (with_parts - plain).abs().max() > 0.1
    assert torch.equal(planned(model), plain)
    assert torch.equal(raw(model), before)


def test_switches_nest_in_any_order_of_leaving() -> None:
    model = tiny()
    base, one, two = model.hf.base_model, adapter(model, 1), adapter(model, 2)
    before = raw(model)
    with one.on(base):
        first = raw(model)
        with two.on(base):
            both = raw(model)
            with one.on(base):
                assert not torch.equal(raw(model), both), "on twice is twice"
            assert torch.equal(raw(model), both)
        assert torch.equal(raw(model), first)
        assert not torch.equal(both, first)
    assert torch.equal(raw(model), before)
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(one.on(base))
    inner.enter_context(two.on(base))
    outer.close()
    with two.on(base):
        pass
    alone = raw(model)
    inner.close()
    with two.on(base):
        assert torch.equal(raw(model), alone)
    assert torch.equal(raw(model), before)


def test_a_forward_inside_a_switched_block_is_not_plain_and_says_so() -> None:
    model = tiny()
    with adapter(model).on(model.hf.base_model):
        assert len(additions(model)) == 12
        assert additions(model)[0] == "model.layers.0.self_attn.q_proj: forward_hooks"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_inside_takes_everything_off(error: type[BaseException]) -> None:
    model = tiny()
    before = raw(model)
    with pytest.raises(error), adapter(model, 1).on(model.hf.base_model), adapter(model, 2).on(model.hf.base_model):
        raise error
    assert additions(model) == []
    assert torch.equal(raw(model), before)


def test_an_exception_in_the_middle_of_a_forward_takes_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    before, plain = raw(model), planned(model)

    def failing(*args: object, **kwargs: object) -> None:
        assert additions(model), "the adapter is not on here, so nothing is tested"
        raise RuntimeError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(model.hf.base_model.layers[1].mlp, "forward", failing)
        with pytest.raises(RuntimeError, match="planted"):
            planned(model, Parts(adapter(model)))
    assert torch.equal(raw(model), before)
    assert torch.equal(planned(model), plain)


def test_a_layer_that_is_not_there_leaves_no_hooks_of_those_that_are() -> None:
    model = tiny()
    pairs = {**adapter(model).pairs, "layers.9.self_attn.q_proj": (torch.ones(1, 64), torch.ones(64, 1))}
    with pytest.raises(AttributeError), Adapter(pairs, 1.0).on(model.hf.base_model):
        pass
    assert additions(model) == []


def test_within_limits_an_adapter_to_the_layers_of_that_name() -> None:
    model, it = tiny(), adapter(tiny())
    base = model.hf.base_model
    with it.on(base, "layers.1."):
        assert {line.split(".self_attn")[0] for line in additions(model)} == {"model.layers.1"}
        limited = raw(model)
    only = Adapter({name: pair for name, pair in it.pairs.items() if name.startswith("layers.1.")}, it.scaling)
    with only.on(base):
        assert torch.equal(raw(model), limited)
    with it.on(base, "layers.1"), it.on(base, "layers.0."), it.on(base, "layers.2."):
        pieces = raw(model)
    with it.on(base):
        assert torch.equal(raw(model), pieces)
    before = raw(model)
    with it.on(base, "layers.17."):
        assert torch.equal(raw(model), before)


def test_layer_1_is_not_layer_10() -> None:
    hf = build("llama", num_hidden_layers=11)
    pair = (torch.ones(1, 64), torch.ones(64, 1))
    it = Adapter({f"layers.{n}.self_attn.q_proj": pair for n in (1, 10)}, 1.0)
    with it.on(hf.base_model, "layers.1."):
        hooked = [name for name, module in hf.base_model.named_modules() if module._forward_hooks]
    assert hooked == ["layers.1.self_attn.q_proj"]


@families
def test_a_soft_token_that_is_a_tokens_embedding_is_that_token(family: str) -> None:
    model = tiny(family)
    rows: Any = model.hf.get_input_embeddings()
    with torch.no_grad():
        soft = rows(torch.tensor(IDS[:3]))
    ids = (*soft_ids(2), *IDS[2:10], *soft_ids(1, 2), *IDS[11:])
    same = (*IDS[:10], IDS[2], *IDS[11:])
    assert torch.equal(planned(model, Parts(soft=soft), ids), planned(model, None, same))


def test_soft_ids_are_no_tokens_of_any_vocabulary() -> None:
    assert soft_ids(2, 3) == (SOFT + 3, SOFT + 4)
    assert soft_ids(0) == ()
    assert SOFT > 2**20 * 100


@pytest.mark.parametrize("rows", [None, 2])
def test_a_soft_token_without_its_row_is_an_integrity_error(rows: int | None) -> None:
    model = tiny()
    soft = None if rows is None else torch.ones(rows, 64)
    ids = (*IDS[:3], *soft_ids(1, 2))
    with pytest.raises(IntegrityError, match="soft token 2: its trained row is not at hand"):
        embedded(model.hf.get_input_embeddings(), torch.tensor([ids]), soft)
    plain = planned(model)
    with pytest.raises(IntegrityError, match="soft token 2"):
        planned(model, Parts(soft=soft), ids)
    assert torch.equal(planned(model), plain)


def test_parts_come_in_the_order_header_trailer_with_the_scaling_of_alpha_over_rank() -> None:
    named = random_parts(tiny(), 4, 2, 3)
    parts = parts_of(dict(reversed(named.items())), 6.0)
    assert parts.soft is not None
    assert torch.equal(parts.soft, torch.cat((named["header"], named["trailer"])))
    assert parts.adapter is not None
    assert parts.adapter.scaling == 1.5
    nothing = parts_of({}, 1.0)
    assert (nothing.adapter, nothing.soft) == (None, None)
    assert parts_of({"trailer": named["trailer"]}, 1.0).adapter is None


# --- an adapter left enabled by mistake ------------------------------------------------------------------------------


def test_an_adapter_left_on_the_reader_fails_the_gate() -> None:
    hf = build("llama")
    model = LanguageModel.wrap(hf, tiny().tokenizer, "left-on", "left on")
    engine, docs = make_engine(model), documents(2)
    assert all(check.passed for check in check_endpoints(engine, docs))
    assert additions(model) == []
    writer = random_writer(model, "sempic")
    assert writer.parts.adapter is not None
    left_on = writer.parts.adapter.on(model.hf.base_model)
    left_on.__enter__()
    try:
        [failed] = [check for check in check_endpoints(engine, docs) if not check.passed]
        assert (failed.name, failed.value) == ("hooks left on the reader, such as an adapter's", 12.0)
    finally:
        left_on.__exit__(None, None, None)
    assert all(check.passed for check in check_endpoints(engine, docs))
    engine.close()


def test_other_ways_to_leave_something_on_a_model_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    module = model.hf.base_model.layers[1].mlp
    with monkeypatch.context() as patched:
        patched.setattr(module, "forward", module.forward)
        assert additions(model) == ["model.layers.1.mlp: forward"]
    handle = model.hf.register_forward_pre_hook(lambda module, args: None)
    assert additions(model) == ["the model: forward_pre_hooks"]
    handle.remove()


def test_what_transformers_leaves_to_note_hidden_states_is_its_own() -> None:
    model = LanguageModel.wrap(build("llama"), tiny().tokenizer, "noting", "noting")
    model.hf(input_ids=torch.tensor([IDS]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.hf.modules()), "it leaves none, so nothing was tested"
    assert additions(model) == []
