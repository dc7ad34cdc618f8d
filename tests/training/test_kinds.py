"""Every kind of writer through the whole way: trained, stopped and gone on with, saved, loaded, served."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kvquilt.errors import InputError, WriterMismatchError
from kvquilt.fidelity import compare, truth
from kvquilt.model.intact import additions
from kvquilt.placement import place_runs
from kvquilt.repair.presets import METHODS, find_method
from kvquilt.training.begun import Begun
from kvquilt.training.block_tuned import TunedShape
from kvquilt.training.config import KINDS, TrainConfig, own
from kvquilt.training.encoder import EncoderShape
from kvquilt.training.link_tokens import LinkShape
from kvquilt.training.shape import Shape
from kvquilt.training.trainable import Trainable
from kvquilt.training.trainer import Trainer
from kvquilt.writers.artefact import load_writer, read_manifest
from kvquilt.writers.block_tuned import Tuning, tuned
from kvquilt.writers.link_tokens import LinkTokens
from tests.engines import make_engine
from tests.models import tiny
from tests.training.runs import StoppedError, exercises, same, stop_after, trainer, values, without

SHAPES: dict[str, Trainable] = {
    "kv-packet": Shape(rank=0, header=2, trailer=1),
    "sempic": Shape(rank=2),
    "joint": Shape(rank=2, header=1, trailer=1),
    "link-tokens": LinkShape(2),
    "encoder": EncoderShape(1),
    "block-tuned": TunedShape(2),
    "block-tuned, whole weights": TunedShape(0),
}
every = pytest.mark.parametrize("name", SHAPES)


def config(name: str, **changes: object) -> TrainConfig:
    kind = name.split(",")[0]
    rates = {"lr": 2e-5 if "whole" in name else 5e-3, "lr_soft": 5e-2}
    base = {"kind": kind, "shape": SHAPES[name], "epochs": 3, **rates}
    return without(own(kind), **{**base, "batch": 2, "new_tokens": 3, "top": 8, **changes})


def run(folder: Path, name: str, **changes: object) -> Trainer:
    return trainer(folder, config(name, **changes))


def test_every_kind_is_tried_here() -> None:
    assert {name.split(",")[0] for name in SHAPES} == set(KINDS)
    assert all(name in METHODS for name in KINDS if name != "block-tuned"), "each is served by a method of its name"


@every
def test_training_brings_its_exercises_nearer_and_leaves_the_reader_as_it_was(name: str, tmp_path: Path) -> None:
    model = tiny()
    before = {n: p.detach().clone() for n, p in model.hf.named_parameters()}
    gently = {"lr": 1e-3} if name == "block-tuned" else {}  # the tiny model is near itself from the start
    made = trainer(tmp_path, config(name, validate_every=2, **gently), held_out=exercises(5))
    made.train()
    assert made.place is not None
    assert made.place.before is not None
    assert made.place.best is not None
    assert made.place.best < made.place.before["validation"]
    assert all(torch.equal(p, before[n]) for n, p in model.hf.named_parameters())
    assert additions(model) == []


@every
def test_a_run_that_was_stopped_ends_as_one_that_was_not(name: str, tmp_path: Path) -> None:
    whole = values(run(tmp_path / "whole", name).train())
    with pytest.raises(StoppedError):
        run(tmp_path / "parts", name).train(stop_after(3))
    assert same(values(run(tmp_path / "parts", name).train()), whole)


@every
def test_what_is_served_from_the_folder_is_what_validation_measured(name: str, tmp_path: Path) -> None:
    made = run(tmp_path, name, top=0)
    made.train()
    assert made.place is not None
    kind, (held,) = made.config.kind, made.held_out
    assert read_manifest(tmp_path)["recipe"]["shape"] == made.config.as_dict()["shape"] | {
        k: list(v) for k, v in made.config.as_dict()["shape"].items() if isinstance(v, tuple)
    }
    if kind == "block-tuned":
        engine = make_engine(tuned(tiny(), tmp_path), system="Be brief.")
    else:
        engine = make_engine(writers={kind: load_writer(tmp_path, tiny())}, system="Be brief.")
    method, found = find_method("none" if kind == "block-tuned" else kind), []
    with make_engine(system="Be brief.") as teacher, engine:
        for question in held.questions:
            placement = place_runs(teacher.prompt(question, held.documents).runs(teacher.model.tokenizer))
            true = truth(teacher, placement, None, made.config.new_tokens)
            if true.ids[0] not in teacher.model.stop_ids:
                found.append(compare(engine, placement, method, None, true).kl)
    assert float(torch.cat(found).mean()) == pytest.approx(made.place.best, rel=2e-3, abs=2e-5)


@every
def test_a_run_begins_with_an_artefact_and_parts_stay_frozen(name: str, tmp_path: Path) -> None:
    trainer(tmp_path / "first", config(name, steps=2), held_out=()).train()
    start = Begun.read(tmp_path / "first")
    shape = SHAPES[name].sized(start)
    assert _sizes(shape) == _sizes(SHAPES[name])
    kept = shape.kinds[0]
    if len(shape.kinds) == 1:
        with pytest.raises(InputError, match="something must be left to train"):
            config(name, fixed=(kept,))
        kept = ""
    going = config(name, steps=2, fixed=(kept,) if kept else ())
    made = trainer(tmp_path / "second", going, start=start.named, held_out=()).train()
    moved = {shape.kind_of(n) for n, value in start.named.items() if not torch.equal(made.named[n], value)}
    assert moved == set(shape.kinds) - {kept}


@every
def test_another_model_is_refused(name: str, tmp_path: Path) -> None:
    run(tmp_path, name, steps=1).train()
    refuse = tuned if name.startswith("block-tuned") else lambda model, path: load_writer(path, model)
    with pytest.raises(WriterMismatchError, match="weights"):
        refuse(tiny(seed=1), tmp_path)


def test_a_shape_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="EncoderShape"):
        without(own("encoder"), shape=LinkShape())


def test_an_encoder_stands_behind_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shared_prefix"):
        run(tmp_path, "encoder", shared_prefix=True).train()


def _sizes(shape: Trainable) -> list[tuple[str, object]]:
    """Without the order of names, which is immaterial."""
    fields = [(field.name, getattr(shape, field.name)) for field in dataclasses.fields(shape)]
    return [(name, set(value) if isinstance(value, tuple) else value) for name, value in fields]


def test_what_an_artefact_cannot_hold_is_refused() -> None:
    model = tiny()
    named = SHAPES["block-tuned"].drawn(model, 0)
    with pytest.raises(InputError, match="alpha"):
        Tuning.of(model.fingerprint, named, float("nan"))
    links = SHAPES["link-tokens"].drawn(model, 0)["links"]
    with pytest.raises(InputError, match="prefix"):
        LinkTokens.of(model.fingerprint, links, (-1,))
