"""What every writer must do; a new writer, or a new kind of side data, adds one line to `WRITERS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from kvquilt.model.language_model import LanguageModel, RowCounter
from kvquilt.segment import CompiledSegment, place, prefix_digest
from kvquilt.store import Layout
from kvquilt.writers.attention_statistics import AttentionStatistics
from kvquilt.writers.digest import Digest
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.residual import Residual
from kvquilt.writers.writer import Writer
from tests.models import tiny
from tests.oracle import random_ids

WRITERS: dict[str, Callable[[], Writer]] = {
    "isolated": Isolated,
    "isolated behind a prefix": lambda: Isolated(random_ids(7, 99)),
    "isolated behind one token": lambda: Isolated((5,)),
    "behind documents": lambda: Isolated(random_ids(150, 98)),
    "attention statistics": lambda: Isolated(random_ids(70, 97), (AttentionStatistics(((7, 30), (30, 61))),)),
    "attention statistics alone": lambda: Isolated((), (AttentionStatistics(),)),
    "digest": lambda: Isolated(random_ids(7, 99), (Digest(random_ids(9, 96)),)),
    "residual": lambda: Isolated((), (Residual(1),)),
    "everything noted": lambda: Isolated(
        random_ids(33, 95), (Residual(2), Digest((7,), 0.5), AttentionStatistics(((1, 33),)), Residual(1))
    ),
}
MODELS = ("llama", "gemma3", "mistral-window", "phi3-partial")
every = pytest.mark.parametrize("name", WRITERS)
on_models = pytest.mark.parametrize("family", MODELS)

pytestmark = pytest.mark.usefixtures("nan_slots")


def compiled(
    writer: Writer, model: LanguageModel, segments: list[tuple[int, ...]], counter: RowCounter | None = None
) -> list[CompiledSegment]:
    found = dict(writer.compile(model, segments, counter))
    assert sorted(found) == list(range(len(segments))), "each index exactly once"
    return [found[i] for i in range(len(segments))]


@every
@on_models
def test_a_segment_has_the_layout_that_the_model_reads(name: str, family: str) -> None:
    writer, model = WRITERS[name](), tiny(family)
    c = model.capability
    lengths = (1, 30, 80)
    for ids, segment in zip(
        [random_ids(n, n) for n in lengths],
        compiled(writer, model, [random_ids(n, n) for n in lengths]),
        strict=True,
    ):
        assert segment.ids == ids
        assert segment.keys.shape == (c.layers, c.kv_heads, len(ids), c.key_dim)
        assert segment.values.shape == (c.layers, c.kv_heads, len(ids), c.value_dim)
        assert segment.keys.dtype == segment.values.dtype == model.dtype
        assert bool(torch.isfinite(segment.keys).all())
        assert bool(torch.isfinite(segment.values).all())
        assert segment.keys.is_contiguous()
        tensors = (segment.keys, segment.values, *segment.side.values())
        assert segment.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert set(segment.side) == writer.side, "a reader's layout asks for them by these names"
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
        assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors)
        assert Layout(model.dtype, c.layers, c.kv_heads, c.key_dim, c.value_dim, writer.side).refusal(segment) is None


@every
@on_models
def test_a_batch_gives_what_one_by_one_gives(name: str, family: str) -> None:
    writer, model = WRITERS[name](), tiny(family)
    segments = [random_ids(n, n) for n in (40, 3, 17, 18, 17, 90, 1, 600)]
    for one, many in zip(
        [compiled(writer, model, [s])[0] for s in segments], compiled(writer, model, segments), strict=True
    ):
        assert (one.ids, one.start, one.prefix) == (many.ids, many.start, many.prefix)
        assert torch.allclose(one.keys, many.keys, atol=1e-5)
        assert torch.allclose(one.values, many.values, atol=1e-5)
        assert all(close_side(name, one.side[name], many.side[name]) for name in writer.side)


def close_side(name: str, one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal up to rounding; a ranking up to neighbours whose scores are."""
    if name == "digest":
        pairs = zip(one.tolist(), two.tolist(), strict=True)
        return all(len(set(a) & set(b)) >= 0.9 * len(a) for a, b in pairs)
    return torch.allclose(one, two, atol=1e-4)


@every
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    writer, segments = WRITERS[name](), [random_ids(n, n) for n in (12, 30, 31)]
    for one, two in zip(compiled(writer, tiny(), segments), compiled(writer, tiny(), segments), strict=True):
        assert torch.equal(one.keys, two.keys)
        assert torch.equal(one.values, two.values)
        assert list(one.side) == list(two.side)
        assert all(torch.equal(one.side[name], two.side[name]) for name in one.side)


@every
@on_models
def test_layer_0_is_exact_wherever_it_is_placed(name: str, family: str) -> None:
    model, ids = tiny(family), random_ids(20, 4)
    [segment] = compiled(WRITERS[name](), model, [ids])
    before = random_ids(50, 8)
    fresh = model.encode(torch.tensor([[*before, *ids]]))
    moved = torch.empty_like(segment.keys)
    place(segment, 50, model.capability.tables, moved)
    truth = fresh.slot_keys[0, 0, :, 50:70]
    assert float((moved[0] - truth).norm() / truth.norm()) < 1e-5
    assert torch.allclose(segment.values[0], fresh.slot_values[0, 0, :, 50:70], atol=1e-5)
    model.pool.release(fresh)


@every
@on_models
def test_behind_what_it_says_it_was_encoded_behind_a_segment_is_exact_in_all_layers(name: str, family: str) -> None:
    writer, model, ids = WRITERS[name](), tiny(family), random_ids(33, 4)
    behind = writer.encoded_behind
    if behind is None:
        pytest.skip("this writer's segments are never exact")
    [segment] = compiled(writer, model, [ids])
    assert (segment.start, segment.prefix) == (len(behind), prefix_digest(behind))
    fresh = model.encode(torch.tensor([[*behind, *ids]]))
    rows = slice(len(behind), len(behind) + 33)
    assert torch.allclose(segment.keys, fresh.slot_keys[:, 0, :, rows], atol=1e-5)
    assert torch.allclose(segment.values, fresh.slot_values[:, 0, :, rows], atol=1e-5)
    model.pool.release(fresh)


@every
def test_it_counts_its_rows_and_gives_its_slots_back(name: str) -> None:
    writer, model, counter = WRITERS[name](), tiny(), RowCounter()
    lent = model.pool.lent
    compiled(writer, model, [random_ids(10, 1), random_ids(12, 2)], counter)
    assert counter.rows >= 22
    assert counter.token_layers == 3 * counter.rows
    assert model.pool.lent == lent


@every
def test_segments_come_as_they_are_finished_and_leaving_early_gives_slots_back(name: str) -> None:
    model, counter = tiny(), RowCounter()
    lent = model.pool.lent
    segments = [random_ids(300, n) for n in range(4)]
    going = iter(WRITERS[name]().compile(model, segments, counter))
    index, first = next(going)
    assert first.ids == segments[index]
    assert counter.rows < 4 * 300, "everything was computed before the first came"
    going.close()  # type: ignore[attr-defined]
    assert model.pool.lent == lent


@every
def test_an_error_in_the_model_gives_slots_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny(), []
    lent = model.pool.lent
    layer = model.hf.base_model.layers[2]
    forward = layer.forward

    def failing(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("planted")
        return forward(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", failing)
    with pytest.raises(RuntimeError, match="planted"):
        list(WRITERS[name]().compile(model, [random_ids(300, n) for n in range(4)]))
    assert model.pool.lent == lent


@every
def test_nothing_to_compile_is_nothing(name: str) -> None:
    assert list(WRITERS[name]().compile(tiny(), [])) == []


def test_every_writer_has_a_digest_of_its_own() -> None:
    digests = [make().digest for make in WRITERS.values()]
    assert len(set(digests)) == len(digests)
    assert all(len(d) == 64 for d in digests)
    assert digests == [make().digest for make in WRITERS.values()]


@every
def test_a_writer_is_a_frozen_dataclass(name: str) -> None:
    writer = WRITERS[name]()
    assert dataclasses.is_dataclass(writer)
    assert hash(writer) == hash(WRITERS[name]())
    assert writer == WRITERS[name]()
    for field in dataclasses.fields(writer):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(writer, field.name, None)
