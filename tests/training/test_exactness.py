"""Losses and gradients: what they must not depend on, and what they must add up to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvquilt.errors import NumericsError
from kvquilt.template import PromptTemplate
from kvquilt.training import learner as learning
from kvquilt.training.components import Components
from kvquilt.training.config import TrainConfig
from kvquilt.training.learner import Learner, Tally
from kvquilt.training.lesson import Lesson, lesson
from kvquilt.training.objective import Objective, cross_entropy, divergence
from kvquilt.training.student import Student
from kvquilt.training.targets import Targets
from kvquilt.training.teacher import Target, Teacher
from kvquilt.training.world import World
from tests.models import tiny
from tests.training.runs import SMALL, exercises


def lessons(count: int = 3) -> list[Lesson]:
    model = tiny()
    template = PromptTemplate(model.tokenizer, "Be brief.")
    made = [*exercises(count - 1), *exercises(1, 11, documents=3, questions=3)]
    return [lesson(f"exercise {n}", each, template, model.capability, 8) for n, each in enumerate(made)]


def parts(config: TrainConfig) -> Components:
    """With B drawn, since a fresh one is zero and gives A no gradient."""
    made = Components.fresh(tiny(), config.shape, 0, config.trained)
    draw = torch.Generator().manual_seed(1)
    for name, p in made.named.items():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(p, std=0.1, generator=draw)
    return made


def learn(
    config: TrainConfig, chosen: list[Lesson], world: World | None = None
) -> tuple[Tally, dict[str, torch.Tensor]]:
    """The tally and the gradients of one step."""
    model, components = tiny(), parts(config)
    student = Student(model, config.shape.header, config.shape.trailer, keep_all=not config.checkpointing)
    targets = Targets(model, Teacher(config.new_tokens, config.top, hidden=config.objective.dense > 0), None)
    learner = Learner(model, config, student, targets, components, world or World())
    tally = learner.learn(chosen, [list(range(len(each.documents))) for each in chosen])
    return tally, {name: p.grad.clone() for name, p in components.trained.items() if p.grad is not None}


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5 * float(b[name].abs().max()) + 1e-7)


@pytest.mark.parametrize("normalise", ["token_mean", "sum"])
def test_a_step_does_not_depend_on_the_split_into_micro_batches(normalise: str) -> None:
    config = replace(SMALL, normalise=normalise, batch=3)
    one, together = learn(replace(config, micro_batch=1), lessons()), learn(replace(config, micro_batch=3), lessons())
    assert one[0].tokens == together[0].tokens
    assert one[0].loss == pytest.approx(together[0].loss, rel=1e-5)
    close(one[1], together[1])
    assert any(float(g.abs().max()) > 0 for g in one[1].values())


def test_the_sum_of_two_exercises_is_the_sum_of_their_losses_and_the_mean_goes_by_tokens() -> None:
    config, both = replace(SMALL, normalise="sum"), lessons()[1:]
    single = [learn(config, [each]) for each in both]
    tally, gradients = learn(config, both)
    assert tally.loss == pytest.approx(sum(each.loss for each, _ in single), rel=1e-5)
    close(gradients, {name: single[0][1][name] + single[1][1][name] for name in gradients})
    _, mean = learn(replace(config, normalise="token_mean"), both)
    close(mean, {name: g / tally.tokens for name, g in gradients.items()})


def test_checkpointing_changes_no_gradient() -> None:
    plain, kept = learn(SMALL, lessons()), learn(replace(SMALL, checkpointing=True), lessons())
    assert kept[0].loss == pytest.approx(plain[0].loss, rel=1e-5)
    close(plain[1], kept[1])


def test_only_trained_parts_have_gradients_and_b_learns_first() -> None:
    config = replace(SMALL, fixed=("header", "trailer"))
    assert {name.rsplit(".", 1)[1] for name in learn(config, lessons())[1]} == {"lora_A", "lora_B"}
    model = tiny()
    fresh = Components.fresh(model, config.shape, 0, config.trained)
    student = Student(model, config.shape.header, config.shape.trailer, keep_all=True)
    targets = Targets(model, Teacher(3, 8, hidden=True), None)
    Learner(model, config, student, targets, fresh, World()).learn(lessons(), [[0, 1], [0, 1], [0, 1, 2]])
    last = f"layers.{model.capability.layers - 1}.self_attn."
    for name, p in fresh.trained.items():
        is_dead = name.endswith("lora_A") or name.startswith((f"{last}q_proj", f"{last}o_proj"))
        assert bool(p.grad.any()) is not is_dead, name


def logits_and_target(top: int, steps: int = 5, vocabulary: int = 40) -> tuple[torch.Tensor, Target]:
    draw = torch.Generator().manual_seed(3)
    own, theirs = (torch.randn(steps, vocabulary, generator=draw) for _ in range(2))
    kept = Teacher(top=top)._kept(theirs.log_softmax(-1))
    return own, Target(tuple(theirs.argmax(-1).tolist()), *kept)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_part_of_the_vocabulary_never_gives_more_than_all_of_it(temperature: float) -> None:
    own, whole = logits_and_target(0)
    exact = divergence(whole, own, temperature)
    before = torch.zeros_like(exact)
    for top in (1, 4, 16, 39):
        if temperature != 1.0 and top < 39:
            continue  # the rest's own spread is not known: only one token left out is exact
        found = divergence(logits_and_target(top)[1], own, temperature)
        assert bool((found <= exact + 1e-5).all())
        assert bool((found >= before - 1e-5).all())  # merging fewer outcomes lowers it less
        before = found
    torch.testing.assert_close(before, exact)
    torch.testing.assert_close(divergence(logits_and_target(40)[1], own, temperature), exact)


def test_divergence_is_forward_kl_and_zero_for_the_teacher_itself() -> None:
    own, target = logits_and_target(0)
    p = torch.full_like(own, -math.inf).scatter(-1, target.top.long(), target.log_probs)
    expected = (p.exp() * (p - own.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(divergence(target, own), expected)
    torch.testing.assert_close(divergence(target, p), torch.zeros(len(own)), atol=1e-5, rtol=0)
    assert bool((cross_entropy(target, own) > 0).all())


def test_a_loss_that_is_not_finite_names_its_exercise_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = learning.divergence, []

    def broken(*args):
        calls.append(1)
        return real(*args) * (math.nan if len(calls) == 3 else 1.0)  # the first question of the second exercise

    monkeypatch.setattr(learning, "divergence", broken)
    with pytest.raises(NumericsError, match="on exercise 1; nothing was updated"):
        learn(replace(SMALL, objective=Objective()), lessons())


def test_a_gradient_that_is_not_finite_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * math.inf

    real = learning.divergence
    monkeypatch.setattr(learning, "divergence", lambda *args: Poison.apply(real(*args)))
    with pytest.raises(NumericsError, match="a gradient is not finite"):
        learn(replace(SMALL, objective=Objective()), lessons())
