from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvquilt.errors import InputError, WriterError, WriterMismatchError
from kvquilt.model.graph import frozen
from kvquilt.model.language_model import LanguageModel
from kvquilt.repair.presets import METHODS
from kvquilt.training.block_tuned import BlockStudent, TunedShape
from kvquilt.writers.block_tuned import Tuning, tuned
from tests.engines import at_rest, make_engine
from tests.models import tiny
from tests.training.steps import Taught, answers, documents, parameters, served, train

ADAPTER = TunedShape(rank=2)
SHAPES = {"adapter": ADAPTER, "whole weights": TunedShape(rank=0)}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
pytestmark = pytest.mark.usefixtures("nan_slots")


def drawn(model: LanguageModel, shape: TunedShape, size: float = 0.1) -> dict[str, torch.nn.Parameter]:
    """Tensors that make another model of it."""
    generator = torch.Generator().manual_seed(3)
    named = parameters(shape.drawn(model, 0))
    with torch.no_grad():
        for name, p in named.items():
            if not name.endswith(".lora_A"):
                p += size * torch.randn(p.shape, generator=generator) * (1 if "lora" in name else 0.2)
    return named


def of_family(family: str, shape: TunedShape) -> TunedShape:
    fused = family.startswith("phi3")
    return TunedShape(shape.rank, 16.0, ("qkv_proj", "o_proj")) if fused else shape


@shapes
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3-partial"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_student_is_the_served_model_under_both_masks(family: str, shape: TunedShape, shared: bool) -> None:
    base = make_engine(family, shared_prefix=shared)
    model, shape = base.model, of_family(family, shape)
    named, known = drawn(model, shape), Taught.by(base.model, base._template, count=1)
    made = make_engine(Tuning.of(model.fingerprint, named, shape.alpha).merged(model), shared_prefix=shared)
    student = BlockStudent(model, base._template.opening if shared else ())
    with torch.no_grad():
        reads = student.read(shape.parts(named), known.lessons, known.branches)
        whole = student.read_whole(shape.parts(named), known.lessons, known.branches)
    block, full = (served(made, known, METHODS[name], teacher=base) for name in ("none", "full"))
    assert answers(known, reads) == pytest.approx(block, rel=1e-3, abs=1e-3)
    assert answers(known, whole) == pytest.approx(full, rel=1e-3, abs=1e-3)
    assert block != pytest.approx(full, abs=1e-3)
    assert block != pytest.approx(served(base, known, METHODS["none"]), abs=1e-3)


@shapes
def test_at_the_start_nothing_is_changed(shape: TunedShape) -> None:
    base = make_engine()
    known = Taught.by(base.model, base._template, count=1)
    student, parts = BlockStudent(base.model), shape.parts(shape.drawn(base.model, 0))
    assert known.total(student.read_whole(parts, known.lessons, known.branches)) == pytest.approx(0, abs=1e-4)


@shapes
@pytest.mark.parametrize("keep_all", [False, True])
@pytest.mark.parametrize("prefixed", [False, True])
def test_learning_weighs_both_masks(shape: TunedShape, keep_all: bool, prefixed: bool) -> None:
    engine = make_engine()
    model, named = engine.model, drawn(engine.model, shape)
    known = Taught.by(model, engine._template)
    student = BlockStudent(model, engine._template.opening if prefixed else (), keep_all, full=0.25)
    with frozen(model):
        student.learn(shape.parts(named), known.lessons, known.branches, known.kl)
        found = {name: p.grad for name, p in named.items()}
        for p in named.values():
            p.grad = None
        parts = shape.parts(named)
        for weight, read in ((0.75, student.read), (0.25, student.read_whole)):
            reads = read(parts, known.lessons, known.branches)
            (weight * torch.stack([known.kl(n, each) for n, each in enumerate(reads)]).sum()).backward()
    for name, p in named.items():
        assert p.grad is not None
        assert float(p.grad.abs().max()) > 0, name
        torch.testing.assert_close(found[name], p.grad, rtol=2e-3, atol=2e-4 * float(p.grad.abs().max()))


@shapes
def test_steps_lower_both_and_the_reader_is_bit_equal_afterwards(shape: TunedShape) -> None:
    engine = make_engine()
    model, known = engine.model, Taught.by(engine.model, engine._template)
    before = {name: tensor.clone() for name, tensor in model.hf.state_dict().items()}
    owned = {name: id(p) for name, p in model.hf.named_parameters()}
    student, named = BlockStudent(model), drawn(model, shape, 0.03)

    def losses() -> list[float]:
        with torch.no_grad():
            both = (student.read, student.read_whole)
            return [known.total(read(shape.parts(named), known.lessons, known.branches)) for read in both]

    start = losses()
    train(model, student, shape, named, known, 1e-2 if shape.rank else 1e-3, 30)
    assert all(b < 0.6 * a for a, b in zip(start, losses(), strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.hf.state_dict().items())
    assert {name: id(p) for name, p in model.hf.named_parameters()} == owned
    assert all(p.grad is None and p.requires_grad for p in model.hf.parameters())
    at_rest(engine)


def test_an_error_in_a_step_leaves_the_reader_as_it_was() -> None:
    model, shape = tiny(), SHAPES["whole weights"]
    known, named = Taught.by(model, make_engine(model)._template, count=1), drawn(model, shape)
    owned = {name: id(p) for name, p in model.hf.named_parameters()}

    def failing(*args: object) -> None:
        raise RuntimeError("planted")

    handle = model.hf.base_model.layers[1].register_forward_hook(failing)
    try:
        with pytest.raises(RuntimeError, match="planted"), frozen(model):
            BlockStudent(model).learn(shape.parts(named), known.lessons, known.branches, known.kl)
    finally:
        handle.remove()
    assert {name: id(p) for name, p in model.hf.named_parameters()} == owned


def test_segments_of_the_base_model_are_misses_and_the_base_is_untouched(tmp_path: Path) -> None:
    base = make_engine(directory=tmp_path / "store")
    model, known = base.model, Taught.by(base.model, base._template, count=1)
    before = served(base, known, METHODS["none"])
    kept = documents(known)
    assert base.compile(kept, gate=False).compiled == 0
    made = Tuning.of(model.fingerprint, drawn(model, ADAPTER), ADAPTER.alpha).merged(model)
    assert made.fingerprint.weights != model.fingerprint.weights
    assert (made.fingerprint.rope, made.fingerprint.tokenizer) == (model.fingerprint.rope, model.fingerprint.tokenizer)
    other = make_engine(made)
    other.store, other.reader = base.store, type(other.reader)(made, base.store, other.writer, other.reader.preamble)
    assert other.compile(kept, gate=False).compiled == len(kept)
    assert served(base, known, METHODS["none"]) == before
    shared = {id(p) for p in model.hf.parameters()} & {id(p) for p in made.hf.parameters()}
    assert len(shared) == len(list(model.hf.parameters())) - 4 * model.capability.layers
    base.close()


@shapes
def test_a_folder_makes_the_same_model_again(shape: TunedShape, tmp_path: Path) -> None:
    model, named = tiny(), drawn(tiny(), shape)
    tuning = Tuning.of(model.fingerprint, named, shape.alpha, "tiny")
    assert tuning.save(tmp_path / "one", {"lr": 1}) == tuning.save(tmp_path / "two", {"lr": 1}) == tuning.content
    files = {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "two").iterdir()}
    assert ("adapter_model.safetensors" in files) == bool(shape.rank)
    made, again = tuning.merged(model), tuned(model, tmp_path / "one")
    assert made.fingerprint == again.fingerprint
    assert all(torch.equal(a, b) for a, b in zip(made.hf.parameters(), again.hf.parameters(), strict=True))
    with pytest.raises(WriterMismatchError, match="weights"):
        tuned(tiny(seed=1), tmp_path / "one")
    with pytest.raises(WriterMismatchError, match="weights"):
        tuned(made, tmp_path / "one")
    name = "adapter_model.safetensors" if shape.rank else "weights.safetensors"
    (tmp_path / "one" / name).write_bytes(files[name][:-1] + b"x")
    with pytest.raises(WriterError, match="damaged"):
        tuned(model, tmp_path / "one")


def test_other_tensors_are_another_model() -> None:
    model, named = tiny(), drawn(tiny(), ADAPTER)
    name = next(iter(named))
    changed = {**named, name: named[name] * 1.001}
    made = {
        Tuning.of(model.fingerprint, tensors, alpha).content
        for tensors, alpha in ((named, 16.0), (named, 8.0), (changed, 16.0))
    }
    assert len(made) == 3
    with pytest.raises(InputError, match="at least one"):
        Tuning.of(model.fingerprint, {}, 16.0)
    with pytest.raises(InputError, match="between 0 and 1"):
        TunedShape(full_share=1.5)
    with pytest.raises(InputError, match="targets"):
        TunedShape(targets=())
