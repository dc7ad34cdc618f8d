"""A few steps of any student, and what its answers are worth, without the trainer around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvquilt.engine import Engine
from kvquilt.fidelity import compare, truth
from kvquilt.model.graph import Read, frozen
from kvquilt.model.language_model import LanguageModel
from kvquilt.placement import place_runs
from kvquilt.prompt import Document
from kvquilt.repair.presets import Method
from kvquilt.template import PromptTemplate
from kvquilt.training.exercise import Exercise
from kvquilt.training.lesson import Lesson, lesson
from kvquilt.training.objective import divergence
from kvquilt.training.teacher import Branches, Target, Teacher
from tests.training.runs import exercises

TOKENS = 4


@dataclass(frozen=True, eq=False, slots=True)
class Taught:
    """Exercises, their lessons, and what the teacher says."""

    exercises: list[Exercise]
    lessons: list[Lesson]
    targets: list[list[Target]]
    branches: list[Branches]

    @classmethod
    def by(cls, model: LanguageModel, template: PromptTemplate, count: int = 2, documents: int = 3) -> Taught:
        made = exercises(count, documents=documents)
        lessons = [lesson(f"exercise {n}", each, template, model.capability, 64) for n, each in enumerate(made)]
        targets = [Teacher(TOKENS, 0).targets(model, each) for each in lessons]
        branches = [
            Branches.of(each.questions, [t.answer for t in known]) for each, known in zip(lessons, targets, strict=True)
        ]
        return cls(made, lessons, targets, branches)

    def kl(self, n: int, read: Read) -> torch.Tensor:
        """Of one lesson, summed over its answers."""
        known, branches = self.targets[n], self.branches[n]
        return torch.stack(
            [divergence(t, branches.answer_rows(read.logits, b)).sum() for b, t in enumerate(known)]
        ).sum()

    def total(self, reads: list[Read]) -> float:
        return float(sum(self.kl(n, read).detach() for n, read in enumerate(reads)))


def parameters(named: Mapping[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(tensor.clone()) for name, tensor in named.items()}


def train(
    model: LanguageModel,
    student: Any,
    shape: Any,
    named: dict[str, torch.nn.Parameter],
    known: Taught,
    lr: float,
    steps: int,
) -> None:
    optimizer = torch.optim.AdamW(named.values(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        with frozen(model):
            student.learn(shape.parts(named), known.lessons, known.branches, known.kl)
        optimizer.step()
        optimizer.zero_grad()


def served(
    engine: Engine,
    known: Taught,
    method: Method,
    teacher: Engine | None = None,
) -> list[float]:
    """KL of a method against the teacher's full prefill, per question, summed over its answer."""
    asked = teacher or engine
    out = []
    for each in known.exercises:
        for question in each.questions:
            placement = place_runs(engine.prompt(question, each.documents).runs(engine.model.tokenizer))
            true = truth(asked, placement, None, TOKENS)
            out.append(float(compare(engine, placement, method, None, true).kl.sum()))
    return out


def answers(known: Taught, reads: list[Read]) -> list[float]:
    """The same of a student."""
    return [
        float(divergence(t, known.branches[n].answer_rows(reads[n].logits.detach(), b)).sum())
        for n in range(len(reads))
        for b, t in enumerate(known.targets[n])
    ]


def documents(known: Taught) -> list[Document]:
    return [d for each in known.exercises for d in each.documents]
