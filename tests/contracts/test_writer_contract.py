"""What every writer must do; a new writer, or a new kind of side data, adds one line to `WRITERS`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvquilt.identity import segment_key
from kvquilt.model.counter import RowCounter
from kvquilt.model.intact import additions
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import SOFT
from kvquilt.model.rows import RowPlan
from kvquilt.segment import CompiledSegment, place, prefix_digest
from kvquilt.store import Layout, Store
from kvquilt.store.base import Failure
from kvquilt.writers.artefact import make_writer
from kvquilt.writers.attention_statistics import AttentionStatistics
from kvquilt.writers.digest import Digest
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.residual import Residual
from kvquilt.writers.trained import Trained
from kvquilt.writers.writer import Writer
from tests.models import tiny
from tests.oracle import close, far, full_prefill, random_ids, stock
from tests.writers.trained import random_parts

Make = Callable[[LanguageModel], Writer]
PREFIX = random_ids(7, 99)


def trained(kind: str, *shape: int, prefix: tuple[int, ...] = (), targets: tuple[str, ...] = ()) -> Make:
    """With random weights that change a lot; `shape` is rank, header, trailer."""

    def make(model: LanguageModel) -> Trained:
        named = random_parts(model, *shape, targets=targets)
        return make_writer(kind, model.fingerprint, named, 4.0, prefix, model.name)

    return make


WRITERS: dict[str, Make] = {
    "isolated": lambda model: Isolated(),
    "isolated behind a prefix": lambda model: Isolated(PREFIX),
    "isolated behind one token": lambda model: Isolated((5,)),
    "behind documents": lambda model: Isolated(random_ids(150, 98)),
    "attention statistics": lambda model: Isolated(random_ids(70, 97), (AttentionStatistics(((7, 30), (30, 61))),)),
    "attention statistics alone": lambda model: Isolated((), (AttentionStatistics(),)),
    "digest": lambda model: Isolated(PREFIX, (Digest(random_ids(9, 96)),)),
    "residual": lambda model: Isolated((), (Residual(1),)),
    "everything noted": lambda model: Isolated(
        random_ids(33, 95), (Residual(2), Digest((7,), 0.5), AttentionStatistics(((1, 33),)), Residual(1))
    ),
    "kv-packet": trained("kv-packet", 0, 3, 2),
    "kv-packet behind a prefix": trained("kv-packet", 0, 3, 2, prefix=PREFIX),
    "header alone": trained("kv-packet", 0, 4, 0),
    "trailer alone": trained("kv-packet", 0, 0, 1),
    "sempic": trained("sempic", 4, 0, 0),
    "sempic behind a prefix": trained("sempic", 4, 0, 0, prefix=PREFIX),
    "sempic of rank 1 on two layers": trained("sempic", 1, 0, 0, targets=("o_proj", "down_proj")),
    "joint": trained("joint", 2, 2, 3),
    "joint behind a prefix": trained("joint", 2, 2, 3, prefix=PREFIX),
}
MODELS = ("llama", "qwen3", "gemma3", "mistral-window", "phi3-partial")
every = pytest.mark.parametrize("name", WRITERS)
# every writer on two models, and on all those that between them have all parts: side data, soft tokens, adapter, prefix
BROAD = ("everything noted", "kv-packet behind a prefix", "joint")
CELLS = [(name, family) for family in MODELS for name in WRITERS if family in ("llama", "gemma3") or name in BROAD]
on_models = pytest.mark.parametrize(("name", "family"), CELLS)

pytestmark = pytest.mark.usefixtures("nan_slots")


def compiled(
    writer: Writer, model: LanguageModel, segments: list[tuple[int, ...]], counter: RowCounter | None = None
) -> list[CompiledSegment]:
    found = dict(writer.compile(model, segments, counter))
    assert sorted(found) == list(range(len(segments))), "each index exactly once"
    return [found[i] for i in range(len(segments))]


@on_models
def test_a_segment_has_the_layout_that_the_model_reads(name: str, family: str) -> None:
    writer, model = WRITERS[name](tiny(family)), tiny(family)
    c = model.capability
    lengths = (1, 30, 80)
    for ids, segment in zip(
        [random_ids(n, n) for n in lengths],
        compiled(writer, model, [random_ids(n, n) for n in lengths]),
        strict=True,
    ):
        header, trailer = writer.around
        assert segment.ids == header + ids + trailer
        assert segment.keys.shape == (c.layers, c.kv_heads, len(segment.ids), c.key_dim)
        assert segment.values.shape == (c.layers, c.kv_heads, len(segment.ids), c.value_dim)
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


@on_models
def test_a_batch_gives_what_one_by_one_gives(name: str, family: str) -> None:
    writer, model = WRITERS[name](tiny(family)), tiny(family)
    segments = [random_ids(n, n) for n in (40, 3, 17, 18, 17, 90, 1, 600)]
    for one, many in zip(
        [compiled(writer, model, [s])[0] for s in segments], compiled(writer, model, segments), strict=True
    ):
        assert (one.ids, one.start, one.prefix) == (many.ids, many.start, many.prefix)
        assert far(many.keys, one.keys) < 1e-5
        assert far(many.values, one.values) < 1e-5
        assert all(close_side(name, one.side[name], many.side[name]) for name in writer.side)


def close_side(name: str, one: torch.Tensor, two: torch.Tensor) -> bool:
    """Equal up to rounding; a ranking up to neighbours whose scores are."""
    if name == "digest":
        pairs = zip(one.tolist(), two.tolist(), strict=True)
        return all(len(set(a) & set(b)) >= 0.9 * len(a) for a, b in pairs)
    return torch.allclose(one, two, atol=1e-4)


@every
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    writer, segments = WRITERS[name](tiny()), [random_ids(n, n) for n in (12, 30, 31)]
    for one, two in zip(compiled(writer, tiny(), segments), compiled(writer, tiny(), segments), strict=True):
        assert torch.equal(one.keys, two.keys)
        assert torch.equal(one.values, two.values)
        assert list(one.side) == list(two.side)
        assert all(torch.equal(one.side[name], two.side[name]) for name in one.side)


@on_models
def test_layer_0_is_exact_wherever_it_is_placed(name: str, family: str) -> None:
    model, ids = tiny(family), random_ids(20, 4)
    writer = WRITERS[name](model)
    if writer.encoded_behind is None:
        pytest.skip("this writer's segments are never exact")
    [segment] = compiled(writer, model, [ids])
    before = random_ids(50, 8)
    fresh = model.encode(torch.tensor([[*before, *ids]]))
    moved = torch.empty_like(segment.keys)
    place(segment, 50, model.capability.tables, moved)
    truth = fresh.slot_keys[0, 0, :, 50:70]
    assert float((moved[0] - truth).norm() / truth.norm()) < 1e-5
    assert torch.allclose(segment.values[0], fresh.slot_values[0, 0, :, 50:70], atol=1e-5)
    model.pool.release(fresh)


@on_models
def test_behind_what_it_says_it_was_encoded_behind_a_segment_is_exact_in_all_layers(name: str, family: str) -> None:
    writer, model, ids = WRITERS[name](tiny(family)), tiny(family), random_ids(33, 4)
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
    writer, model, counter = WRITERS[name](tiny()), tiny(), RowCounter()
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
    going = iter(WRITERS[name](tiny()).compile(model, segments, counter))
    index, first = next(going)
    header, trailer = WRITERS[name](model).around
    assert first.ids == header + segments[index] + trailer
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
        list(WRITERS[name](tiny()).compile(model, [random_ids(300, n) for n in range(4)]))
    assert model.pool.lent == lent


@every
def test_nothing_to_compile_is_nothing(name: str) -> None:
    assert list(WRITERS[name](tiny()).compile(tiny(), [])) == []


@on_models
def test_the_rows_around_a_segment_are_marked_and_no_others(name: str, family: str) -> None:
    writer, model, ids = WRITERS[name](tiny(family)), tiny(family), random_ids(9, 4)
    header, trailer = writer.around
    [segment] = compiled(writer, model, [ids])
    soft = [i >= SOFT for i in segment.ids]
    assert soft == [True] * len(header) + [False] * 9 + [True] * len(trailer)
    assert len(set(header + trailer)) == len(header + trailer), "each stands for a row of its own"


@on_models
def test_the_reader_is_bit_equal_before_between_and_after(name: str, family: str) -> None:
    model = tiny(family)
    before = plain_logits(model)
    assert close(before, full_prefill(stock(family), TEXT))
    for _ in WRITERS[name](model).compile(model, [random_ids(n, n) for n in (5, 40, 90)]):
        assert additions(model) == []
        assert torch.equal(plain_logits(model), before)
    assert additions(model) == []
    assert torch.equal(plain_logits(model), before)


@every
def test_an_error_in_the_middle_of_the_pass_leaves_the_reader_bit_equal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, writer = tiny(), WRITERS[name](tiny())
    before, failed = plain_logits(model), []

    def failing(*args: object, **kwargs: object) -> None:
        failed.append(args)
        raise RuntimeError("planted")

    for layer in (0, 1):
        with monkeypatch.context() as patched:
            patched.setattr(model.hf.base_model.layers[layer].mlp, "forward", failing)
            with pytest.raises(RuntimeError, match="planted"):
                list(writer.compile(model, [random_ids(30, 1)]))
        assert additions(model) == []
        assert torch.equal(plain_logits(model), before)
    assert len(failed) == 2


@every
def test_who_reads_while_another_thread_compiles_has_the_bit_equal_reader(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, writer = tiny(), WRITERS[name](tiny())
    before = plain_logits(model)
    inside, trying = threading.Event(), threading.Event()
    layer = model.hf.base_model.layers[1]
    forward = layer.forward

    def pausing(*args: object, **kwargs: object) -> object:
        if threading.current_thread() is compiling:
            inside.set()
            assert trying.wait(60), "nobody asks for the lock: a forward runs without it"
        return forward(*args, **kwargs)

    taken = model.turns.taken

    @contextmanager
    def noting() -> Iterator[None]:
        """The model's turn, which says when the reader asks for it: the other thread goes on no earlier."""
        if threading.current_thread() is not compiling:
            trying.set()
        with taken():
            yield

    compiling = threading.Thread(target=lambda: compiled(writer, model, [random_ids(n, n) for n in (30, 90)]))
    with monkeypatch.context() as patched:
        patched.setattr(layer, "forward", pausing)
        patched.setattr(model.turns, "taken", noting)
        compiling.start()
        assert inside.wait(60), "the pass is in the middle, its parts are on"
        read = [plain_logits(model) for _ in range(3)]
        compiling.join()
    assert all(torch.equal(each, before) for each in read)


TEXT = random_ids(31, 21)


def plain_logits(model: LanguageModel) -> torch.Tensor:
    """``[tokens, vocabulary]`` of a plain text, all rows computed."""
    with model.pool.lend(len(TEXT)) as cache:
        plan = RowPlan(torch.arange(len(TEXT)), len(TEXT))
        return model.forward(torch.tensor([TEXT]), plan, cache, len(TEXT))[0]


@on_models
def test_a_store_gives_back_what_was_compiled(name: str, family: str, tmp_path: Path) -> None:
    writer, model, c = WRITERS[name](tiny(family)), tiny(family), tiny(family).capability
    segments = [random_ids(n, n) for n in (1, 20, 33)]
    layout = Layout(model.dtype, c.layers, c.kv_heads, c.key_dim, c.value_dim, writer.side)
    header, trailer = writer.around
    wanted = [
        (segment_key(model.fingerprint.digest, writer.digest, None, header + ids + trailer), header + ids + trailer)
        for ids in segments
    ]
    made = compiled(writer, model, segments)
    with Store.open(tmp_path, 1 << 24, 1 << 24) as store:
        for (key, _), segment in zip(wanted, made, strict=True):
            assert not [answer for answer in store.put(key, segment).values() if isinstance(answer, Failure)]
    with Store.open(tmp_path, 1 << 24, 1 << 24) as store, store.fetch(wanted, layout=layout) as held:
        for one, segment in zip(held, made, strict=True):
            assert one.segment is not None
            assert (one.segment.ids, one.segment.start, one.segment.prefix) == (
                segment.ids, segment.start, segment.prefix)  # fmt: skip
            assert torch.equal(one.segment.keys, segment.keys)
            assert torch.equal(one.segment.values, segment.values)
            assert one.segment.side.keys() == segment.side.keys()


def test_every_writer_has_keys_of_its_own() -> None:
    model, ids = tiny(), random_ids(20, 4)
    keys = [segment_key(model.fingerprint.digest, make(model).digest, None, ids) for make in WRITERS.values()]
    assert len(set(keys)) == len(WRITERS)


def test_every_writer_has_a_digest_of_its_own() -> None:
    digests = [make(tiny()).digest for make in WRITERS.values()]
    assert len(set(digests)) == len(digests)
    assert all(len(d) == 64 for d in digests)
    assert digests == [make(tiny()).digest for make in WRITERS.values()]


@every
def test_a_writer_is_a_frozen_dataclass(name: str) -> None:
    writer = WRITERS[name](tiny())
    assert dataclasses.is_dataclass(writer)
    assert hash(writer) == hash(WRITERS[name](tiny()))
    assert writer == WRITERS[name](tiny())
    for field in dataclasses.fields(writer):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(writer, field.name, None)
