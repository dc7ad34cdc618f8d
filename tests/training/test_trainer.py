"""What a run logs, keeps and refuses."""

from __future__ import annotations

import json
import logging
import math
from itertools import chain
from pathlib import Path

import pytest
import torch

from kvquilt.errors import InputError, NumericsError, UnsupportedModelError
from kvquilt.training import learner as learning
from kvquilt.training.block_tuned import TunedShape
from kvquilt.training.config import KINDS, own, published
from kvquilt.training.objective import Objective
from kvquilt.training.schedule import Schedule
from kvquilt.training.shape import Shape
from kvquilt.training.teacher import Target, Teacher
from kvquilt.writers.artefact import load_writer, read_manifest
from kvquilt.writers.trained import TRAINED
from tests.models import tiny
from tests.training.runs import SMALL, exercises, logged, same, trainer, values, without


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch):
    """A teacher that answers the questions of some exercises with nothing."""

    def make(*silent: str) -> None:
        real, stop = Teacher.targets, next(iter(tiny().stop_ids))

        def targets(self, model, lesson):
            found = real(self, model, lesson)
            if lesson.name not in silent and "*" not in silent:
                return found
            return [Target((stop,), t.top[:1], t.log_probs[:1], t.log_rest[:1]) for t in found]

        monkeypatch.setattr(Teacher, "targets", targets)

    return make


def test_the_log_begins_with_pure_reuse_and_what_rounding_makes(tmp_path: Path) -> None:
    run = trainer(tmp_path, without(kind="sempic", shape=Shape(rank=2), epochs=1))
    run.train()
    first, *steps = logged(tmp_path)
    assert first["step"] == 0
    assert first["validation"] == first["none"]
    assert abs(first["full"]) < 1e-4 < first["none"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert run.place.before["none"] == first["none"]


def test_soft_tokens_do_not_start_as_pure_reuse(tmp_path: Path) -> None:
    trainer(tmp_path / "a", without(epochs=1)).train()
    trainer(tmp_path / "b", without(kind="sempic", shape=Shape(rank=2), epochs=1)).train()
    packet, adapter = logged(tmp_path / "a")[0], logged(tmp_path / "b")[0]
    assert packet["none"] == pytest.approx(adapter["none"], rel=1e-4)
    assert packet["validation"] != packet["none"]


def test_training_brings_held_out_exercises_nearer_and_keeps_the_best(tmp_path: Path) -> None:
    run = trainer(tmp_path, without(epochs=3, validate_every=1))
    made = run.train()
    lines = logged(tmp_path)
    validations = {line["step"]: line["validation"] for line in lines}
    assert run.place.best == min(validations.values())
    assert validations[run.place.best_step] == run.place.best < validations[0]
    writer = load_writer(tmp_path)
    assert same(writer.named(), values(made))
    metrics = read_manifest(tmp_path)["metrics"]
    assert (metrics["kl"], metrics["step"]) == (run.place.best, run.place.best_step)


def test_a_usable_writer_is_there_at_the_first_better_validation(tmp_path: Path) -> None:
    seen = []

    def report(progress) -> None:
        if progress.validation is not None and not seen:
            seen.append((progress.step, load_writer(tmp_path)))

    trainer(tmp_path, without(validate_every=1)).train(report)
    assert seen[0][1].kind == "joint"


def test_nothing_held_out_leaves_the_last_parts(tmp_path: Path) -> None:
    run = trainer(tmp_path, without(epochs=1), held_out=[])
    made = run.train()
    assert run.place.best is None
    assert same(load_writer(tmp_path).named(), values(made))
    assert [line["step"] for line in logged(tmp_path)] == [1, 2, 3]


def test_where_no_step_is_better_the_start_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = without(kind="sempic", shape=Shape(rank=2), epochs=1, lr=50.0)
    with caplog.at_level(logging.WARNING, "kvquilt"):
        made = trainer(tmp_path, config).train()
    assert "was kept" in caplog.text
    assert not any(bool(p.any()) for name, p in made.named.items() if name.endswith("lora_B"))


def test_a_last_batch_may_be_smaller_and_every_epoch_takes_all(tmp_path: Path) -> None:
    schedule = Schedule(without(epochs=2, batch=2), 5)
    assert (schedule.per_epoch, schedule.steps) == (3, 6)
    taken = [schedule.chosen(step) for step in range(6)]
    assert [len(each) for each in taken] == [2, 2, 1] * 2
    epochs = [list(chain(*taken[:3])), list(chain(*taken[3:]))]
    assert [sorted(each) for each in epochs] == [[0, 1, 2, 3, 4]] * 2
    assert epochs[0] != epochs[1]
    assert [schedule.falls(step) for step in (0, 3)] == [1.0, 0.5]
    assert Schedule(without(epochs=2, batch=2, steps=4), 5).steps == 4


def test_nan_keeps_the_last_good_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = learning.divergence, []

    def broken(*args):
        calls.append(1)
        return real(*args) * (math.nan if len(calls) > 8 else 1.0)  # in the third step

    config = without()
    whole = values(trainer(tmp_path / "whole", config).train())
    with monkeypatch.context() as patch:
        patch.setattr(learning, "divergence", broken)
        with pytest.raises(NumericsError, match=r"exercise \d"):
            trainer(tmp_path / "nan", config).train()
    assert [line["step"] for line in logged(tmp_path / "nan")] == [0, 1, 2]
    assert same(values(trainer(tmp_path / "nan", config).train()), whole)


def test_a_teacher_with_nan_names_the_exercise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Teacher.targets

    def targets(self, model, lesson):
        if lesson.name == "exercise 3":
            raise NumericsError("NaN")
        return real(self, model, lesson)

    monkeypatch.setattr(Teacher, "targets", targets)
    with pytest.raises(NumericsError, match="the teacher on exercise 3"):
        trainer(tmp_path, without()).train()


def test_questions_without_an_answer_are_left_out_and_counted(
    tmp_path: Path, silent, caplog: pytest.LogCaptureFixture
) -> None:
    silent("exercise 0", "exercise 3")
    with caplog.at_level(logging.WARNING, "kvquilt"):
        run = trainer(tmp_path, without())
        run.train()
    assert "nothing to 4 of 10 questions" in caplog.text
    assert sum(line["questions"] for line in logged(tmp_path)[1:]) == 12
    assert (run.place.empty, run.place.asked) == (4, 10)


def test_a_teacher_that_answers_nothing_is_refused(tmp_path: Path, silent) -> None:
    silent("*")
    with pytest.raises(InputError, match="answers nothing"):
        trainer(tmp_path / "a", without()).train()
    with pytest.raises(InputError, match="answers nothing"):
        trainer(tmp_path / "b", without(epochs=1), held_out=[]).train()
    assert not (tmp_path / "b" / "writer.json").exists()


def test_a_step_without_answers_changes_nothing(tmp_path: Path, silent) -> None:
    silent("exercise 0", "exercise 1", "exercise 2", "exercise 3")
    config = without(batch=1, epochs=1)
    run = trainer(tmp_path, config, held_out=[])
    run.train()
    lines = logged(tmp_path)
    assert sorted(line["tokens"] for line in lines) == [0, 0, 0, 0, 6]


def test_a_document_longer_than_the_context_is_refused_with_its_exercise(tmp_path: Path) -> None:
    from kvquilt.prompt import Document
    from kvquilt.training.exercise import Exercise

    long = Exercise((Document("word " * 2000),), ("What?",))
    with pytest.raises(InputError, match="exercise 5"):
        trainer(tmp_path, exercises=[*exercises(5), long]).train()
    assert not tmp_path.joinpath("log.jsonl").exists()


def test_a_model_without_the_layers_is_refused_with_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no linear layer named k_proj.*it has .*qkv_proj"):
        trainer(tmp_path, without(), tiny("phi3")).train()
    made = trainer(tmp_path, without(shape=Shape(rank=2, targets=("qkv_proj",)), steps=1), tiny("phi3")).train()
    assert any("qkv_proj" in name for name in made.named)


def test_the_model_is_bit_equal_after_training(tmp_path: Path) -> None:
    model = tiny()
    before = {name: p.detach().clone() for name, p in model.hf.named_parameters()}
    flags, lent = [p.requires_grad for p in model.hf.parameters()], model.pool.lent
    trainer(tmp_path, without(steps=2)).train()
    assert all(torch.equal(p, before[name]) for name, p in model.hf.named_parameters())
    assert [p.requires_grad for p in model.hf.parameters()] == flags
    assert all(p.grad is None for p in model.hf.parameters())
    assert model.pool.lent == lent


@pytest.mark.parametrize("kind", KINDS)
def test_recipes_have_the_parts_of_their_kind(kind: str) -> None:
    assert own(kind).shape == KINDS[kind]
    if kind in TRAINED:
        assert published(kind).shape == KINDS[kind]
        assert {"normalise", "objective.dense"} <= set(own(kind).differences(published(kind).as_dict()))
    else:
        with pytest.raises(InputError, match="published"):
            published(kind)


def test_differences_are_named_in_full() -> None:
    stored = json.loads(json.dumps(SMALL.as_dict()))
    assert SMALL.differences(stored) == []
    del stored["seed"]
    stored["shape"]["rank"] = 5
    assert SMALL.differences(stored) == ["shape.rank", "seed"]


@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    ("made", "field"),
    [
        (lambda number: Shape(rank=2, alpha=number), "alpha"),
        (lambda number: TunedShape(rank=2, alpha=number), "alpha"),
        (lambda number: Objective(temperature=number), "temperature"),
    ],
)
def test_a_number_that_can_teach_nothing_is_refused(made, field: str, number: float) -> None:
    with pytest.raises(InputError, match=f"{field}: a finite number above 0"):
        made(number)


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["kl", "ce", "dense"])
def test_a_weight_is_finite_and_at_least_0(name: str, weight: float) -> None:
    with pytest.raises(InputError, match="objective: weights"):
        Objective(**{name: weight})


@pytest.mark.parametrize("kind", ["kv-packet", "sempic"])
def test_a_kind_has_no_parts_of_another(kind: str) -> None:
    with pytest.raises(InputError, match=f"{kind} has no"):
        without(kind=kind, shape=Shape(rank=2, header=1))
