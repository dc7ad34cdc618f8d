"""Trained writers against stock models with the same additions built in, and what makes one another writer."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvquilt.errors import InputError, WriterMismatchError
from kvquilt.identity import Fingerprint, segment_key
from kvquilt.model.language_model import LanguageModel
from kvquilt.segment import CompiledSegment, prefix_digest
from kvquilt.writers.artefact import make_writer
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.tensors import moved
from kvquilt.writers.trained import TRAINED, Trained
from tests.models import FAMILIES, build, tiny
from tests.oracle import far, random_ids, stock
from tests.writers.trained import SHAPES, random_parts, random_writer

families = pytest.mark.parametrize("family", FAMILIES)
kinds = pytest.mark.parametrize("kind", TRAINED)
BASE = Fingerprint("w" * 64, "t" * 64, "r" * 64, "float32")


def compiled(writer: Trained | Isolated, model: LanguageModel, *segments: tuple[int, ...]) -> list[CompiledSegment]:
    found = dict(writer.compile(model, segments))
    return [found[i] for i in range(len(segments))]


@functools.cache
def merged(family: str, kind: str) -> PreTrainedModel:
    """A stock model with the adapter's products in its weights."""
    hf, writer = build(family), random_writer(tiny(family), kind)
    adapter = writer.parts.adapter
    with torch.no_grad():
        for name, (a, b) in adapter.pairs.items() if adapter else ():
            hf.base_model.get_parameter(f"{name}.weight").add_(adapter.scaling * b @ a)
    return hf


@torch.inference_mode()
def oracle(family: str, kind: str, prefix: tuple[int, ...], ids: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Keys and values by layer: the plain model reads the prefix, the one with the additions the wrapped segment."""
    hf, cache, soft = merged(family, kind), DynamicCache(), random_writer(tiny(family), kind).named()
    if prefix:
        stock(family).base_model(input_ids=torch.tensor([prefix]), cache=cache, use_cache=True)
    rows = hf.get_input_embeddings()(torch.tensor([ids]))[0]
    wrapped = torch.cat([soft.get("header", rows[:0]), rows, soft.get("trailer", rows[:0])])[None]
    positions = torch.arange(len(prefix), len(prefix) + wrapped.shape[1])[None]
    hf.base_model(inputs_embeds=wrapped, position_ids=positions, cache=cache, use_cache=True)
    n = len(prefix)
    return [(layer.keys[0, :, n:], layer.values[0, :, n:]) for layer in cache.layers]


@families
@kinds
@pytest.mark.parametrize("prefix", [(), random_ids(12, 8)], ids=["alone", "behind a prefix"])
def test_it_compiles_what_a_stock_model_with_the_additions_computes(
    kind: str, family: str, prefix: tuple[int, ...]
) -> None:
    model, segments = tiny(family), [random_ids(n, n) for n in (1, 19, 20, 41)]
    writer = random_writer(model, kind, prefix)
    for ids, segment in zip(segments, compiled(writer, model, *segments), strict=True):
        assert (segment.start, segment.prefix) == (len(prefix), prefix_digest(prefix))
        for layer, (keys, values) in enumerate(oracle(family, kind, prefix, ids)):
            assert far(segment.keys[layer], keys) < 1e-4
            assert far(segment.values[layer], values) < 1e-4


@families
@pytest.mark.parametrize("prefix", [(), random_ids(12, 8)], ids=["alone", "behind a prefix"])
def test_an_adapter_whose_b_is_zero_and_no_additions_at_all_are_the_isolated_writer(
    family: str, prefix: tuple[int, ...]
) -> None:
    model, segments = tiny(family), [random_ids(n, n) for n in (3, 30, 31)]
    zero = {n: t * ("lora_A" in n) for n, t in random_parts(model, 4, 0, 0).items()}
    plain = compiled(Isolated(prefix), model, *segments)
    for writer in (
        make_writer("sempic", model.fingerprint, zero, 16.0, prefix),
        make_writer("kv-packet", model.fingerprint, {}, 16.0, prefix),
    ):
        assert writer.around == ((), ())
        for one, two in zip(compiled(writer, model, *segments), plain, strict=True):
            assert (one.ids, one.start, one.prefix) == (two.ids, two.start, two.prefix)
            assert torch.equal(one.keys, two.keys)
            assert torch.equal(one.values, two.values)


@kinds
def test_neighbours_and_their_padding_change_nothing(kind: str) -> None:
    model, ids = tiny(), random_ids(30, 1)
    writer = random_writer(model, kind)
    [alone] = compiled(writer, model, ids)
    for others in ([random_ids(33, 2)], [random_ids(30, 3)] * 3, [random_ids(31, 4), random_ids(34, 5)]):
        first, *_ = compiled(writer, model, ids, *others)
        assert far(first.keys, alone.keys) < 1e-5
        assert far(first.values, alone.values) < 1e-5


def test_every_kind_compiles_something_else() -> None:
    model, ids = tiny(), random_ids(20, 1)
    made = [compiled(random_writer(model, kind), model, ids)[0] for kind in TRAINED]
    rows = [s.values[2, :, s.ids.index(ids[0]) :][:, :20] for s in [*made, *compiled(Isolated(), model, ids)]]
    for i, one in enumerate(rows):
        assert all(far(one, two) > 0.01 for two in rows[i + 1 :])


# --- what makes another writer ---------------------------------------------------------------------------------------


def writer_of(**changes: Any) -> Trained:
    named = {
        "header": torch.full((2, 8), 0.5),
        "trailer": torch.full((3, 8), -0.5),
        "layers.0.self_attn.q_proj.lora_A": torch.full((2, 8), 0.25),
        "layers.0.self_attn.q_proj.lora_B": torch.full((8, 2), 0.125),
    }
    arguments: dict[str, Any] = {"kind": "joint", "base": BASE, "named": named, "alpha": 16.0, "prefix": (1, 2)}
    return make_writer(**{**arguments, **changes})


def nudged(name: str, at: int) -> dict[str, torch.Tensor]:
    named = {name: tensor.clone() for name, tensor in writer_of().named().items()}
    flat = named[name].view(-1)
    flat[at] = torch.nextafter(flat[at], torch.tensor(math.inf))
    return named


def without(part: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in writer_of().named().items() if part not in name}


def shifted() -> dict[str, torch.Tensor]:
    """The same soft rows in the same order."""
    named = writer_of().named()
    rows = torch.cat((named["header"], named["trailer"]))
    return {**named, "header": rows[:1], "trailer": rows[1:]}


def swapped() -> dict[str, torch.Tensor]:
    named = writer_of().named()
    return {**named, "header": named["trailer"], "trailer": named["header"]}


def renamed(old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): tensor for name, tensor in writer_of().named().items()}


def padded_rank() -> dict[str, torch.Tensor]:
    named = writer_of().named()
    a, b = (next(n for n in named if n.endswith(end)) for end in ("lora_A", "lora_B"))
    return {**named, a: torch.cat((named[a], torch.zeros(1, 8))), b: torch.cat((named[b], torch.zeros(8, 1)), 1)}


TENSORS = tuple(writer_of().named())
CHANGES: dict[str, dict[str, Any]] = {
    "kind": {"kind": "sempic"},
    "alpha": {"alpha": math.nextafter(16.0, 17.0)},
    "prefix": {"prefix": (1, 3)},
    "a shorter prefix": {"prefix": (1,)},
    "no prefix": {"prefix": ()},
    **{f"base {name}": {"base": replace(BASE, **{name: "x" * 64})} for name in asdict(BASE)},
    **{f"the least bit of {name}[{at}]": {"named": nudged(name, at)} for name in TENSORS for at in (0, 7, -1)},
    **{f"without {name}": {"named": without(name)} for name in ("header", "trailer", "lora")},
    "a row from the header to the trailer": {"named": shifted()},
    "another layer": {"named": renamed("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj")},
    "another target": {"named": renamed("q_proj", "k_proj")},
    "header and trailer swapped": {"named": swapped()},
    "another rank with the same product": {"named": padded_rank(), "alpha": 24.0},
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_what_it_is_made_of_is_another_writer_with_other_keys(change: str) -> None:
    one, two, ids = writer_of(), writer_of(**CHANGES[change]), (5, 6, 7)
    assert one.digest != two.digest
    assert one != two
    assert segment_key("f", one.digest, None, ids) != segment_key("f", two.digest, None, ids)


def test_no_two_of_the_changed_writers_are_one() -> None:
    assert len({writer_of(**change).digest for change in CHANGES.values()}) == len(CHANGES)


def test_names_and_order_do_not_make_another_writer() -> None:
    one = writer_of()
    same = writer_of(named=dict(reversed(one.named().items())), base_name="what a person calls it")
    assert same.digest == one.digest
    assert same == one
    assert hash(same) == hash(one)
    half = writer_of(named={name: tensor.bfloat16() for name, tensor in one.named().items()})
    assert half.digest == one.digest, "these values are the same in bfloat16"


def test_training_on_does_not_change_a_writer_that_was_made() -> None:
    named = {name: torch.nn.Parameter(tensor) for name, tensor in writer_of().named().items()}
    writer = writer_of(named=named)
    with torch.no_grad():
        for p in named.values():
            p.add_(1)
    assert all(torch.equal(t, writer_of().named()[name]) for name, t in writer.named().items())
    assert not any(t.requires_grad for t in writer.named().values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "sempik"}, "did you mean 'sempic'"),
        ({"alpha": math.nan}, "alpha: must be a finite number"),
        ({"prefix": (1 << 30,)}, "prefix: must be token ids"),
        ({"named": {"middle": torch.ones(1, 8)}}, "must be header, trailer"),
        ({"named": {"lm_head.lora_A": torch.ones(1, 8), "lm_head.lora_B": torch.ones(8, 1)}}, "must be header"),
        ({"named": {"header": torch.ones(8)}}, "must be a matrix"),
        ({"named": {"header": torch.ones(0, 8)}}, "not empty"),
        ({"named": {"header": torch.ones(1, 8), "trailer": torch.ones(1, 9)}}, "trailer must be 8 wide"),
        ({"named": {"header": torch.full((1, 8), math.nan)}}, "header holds NaN"),
        ({"named": {"layers.0.q.lora_B": torch.ones(8, 1)}}, "without layers.0.q.lora_A"),
        ({"named": {"layers.0.q.lora_A": torch.ones(1, 8), "layers.0.q.lora_B": torch.ones(8, 2)}}, "of rank 1"),
    ],
)
def test_tensors_that_do_not_go_together_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        writer_of(**changes)


def test_a_writer_compiles_for_its_own_model_only() -> None:
    writer = random_writer(tiny("llama", 0))
    with pytest.raises(WriterMismatchError, match=r"for tiny-llama in float32, not for tiny-llama .* weights$"):
        next(writer.compile(tiny("llama", 1), [(1, 2)]))
    with pytest.raises(WriterMismatchError, match="weights, rope"):
        next(writer.compile(tiny("llama-yarn", 1), [(1, 2)]))


@kinds
def test_its_tensors_come_back_as_they_were_given(kind: str) -> None:
    named = random_parts(tiny(), *SHAPES[kind])
    back = random_writer(tiny(), kind).named()
    assert back.keys() == named.keys()
    assert all(torch.equal(back[name], named[name]) for name in named)


def test_moving_to_where_it_is_makes_no_copy_and_elsewhere_moves_everything() -> None:
    writer = random_writer(tiny())
    assert moved(writer.parts, torch.device("cpu")) is writer.parts
    there = writer.on(torch.device("meta"))
    assert {t.device.type for t in there.named().values()} == {"meta"}
    assert there.named().keys() == writer.named().keys()
    assert there == writer
