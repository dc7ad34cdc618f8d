"""What one step does up to its gradients: teacher, student, loss, backward, a micro-batch at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kvquilt.errors import NumericsError
from kvquilt.model.graph import Read, frozen
from kvquilt.model.language_model import LanguageModel
from kvquilt.training.components import Components
from kvquilt.training.config import TrainConfig
from kvquilt.training.lesson import Lesson
from kvquilt.training.objective import cross_entropy, divergence, state_error
from kvquilt.training.targets import Targets
from kvquilt.training.teacher import Branches, Target
from kvquilt.training.trainable import Pupil
from kvquilt.training.world import World

Taught = tuple[Lesson, list[Target], list[int]]  # with the order of the student's documents


@dataclass(slots=True)
class Tally:
    """Sums over a step's exercises; `stages` in seconds, of this process."""

    loss: float = 0.0
    kl: float = 0.0
    tokens: int = 0
    questions: int = 0
    empty: int = 0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("teacher", "student"), 0.0))


@dataclass(eq=False, slots=True)
class Learner:
    """Brings gradients to the trained components."""

    model: LanguageModel
    config: TrainConfig
    student: Pupil
    targets: Targets
    components: Components
    world: World

    def learn(self, lessons: Sequence[Lesson], orders: Sequence[list[int]]) -> Tally:
        """Leave in every trained parameter's ``grad`` that of the step's loss over `lessons`, whoever computed it.

        Raises:
            NumericsError: a loss or a gradient is not finite; names the lessons. No parameter was changed.
        """
        tally, bad = Tally(), ""
        mine = self._taught(self.world.share(list(zip(lessons, orders, strict=True))), tally)
        with frozen(self.model):
            for first in range(0, len(mine), self.config.micro_batch):
                bad = bad or self._pass(mine[first : first + self.config.micro_batch], tally)
        gathered = self._summed(tally, bool(bad))
        if gathered:
            where = f" on {bad}" if bad else ""
            raise NumericsError(f"the loss is not finite{where}; nothing was updated")
        scale = 1 / max(1, tally.tokens) if self.config.normalise == "token_mean" else 1.0
        trained = list(self.components.trained.values())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        flat = self.world.add(torch.cat([g.flatten() for g in gradients])) * scale
        if not bool(torch.isfinite(flat).all()):
            names = ", ".join(each.name for each in lessons)
            raise NumericsError(f"a gradient is not finite on {names}; nothing was updated")
        for p, g in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
            p.grad = g.view_as(p)
        return tally

    def _taught(self, share: Sequence[tuple[Lesson, list[int]]], tally: Tally) -> list[Taught]:
        """The lessons with what the teacher says, without questions to which it says nothing."""
        started, out = time.perf_counter(), []
        for each, order in share:
            known = self.targets.of(each)
            kept = answered(known, self.model.stop_ids)
            tally.empty += len(known) - len(kept)
            tally.questions += len(kept)
            if kept:
                left = replace(each, questions=tuple(each.questions[n] for n in kept))
                out.append((left, [known[n] for n in kept], order))
        tally.stages["teacher"] = time.perf_counter() - started
        return out

    def _pass(self, part: Sequence[Taught], tally: Tally) -> str:
        """Forward and backward; the name of the first lesson whose loss is not finite, and then no backward."""
        started = time.perf_counter()
        branches = [Branches.of(each.questions, [t.answer for t in known]) for each, known, _ in part]

        def loss(n: int, read: Read) -> torch.Tensor:
            total, kl = self.loss(part[n][1], branches[n], read)
            value = float(total.detach())
            if not math.isfinite(value):
                raise _NotFiniteError(part[n][0].name)
            tally.loss += value / self.student.passes
            tally.kl += kl / self.student.passes
            return total

        lessons, orders = [each for each, _, _ in part], [order for _, _, order in part]
        dense = self.config.objective.dense > 0
        try:
            self.student.learn(self.components.parts(), lessons, branches, loss, dense, orders)
        except _NotFiniteError as error:
            return str(error)
        tally.tokens += sum(sum(each.answers) for each in branches)
        tally.stages["student"] += time.perf_counter() - started
        return ""

    def loss(self, known: Sequence[Target], branches: Branches, read: Read) -> tuple[torch.Tensor, float]:
        """The objective summed over a lesson's answer tokens, and its KL."""
        goal = self.config.objective
        total, told = torch.zeros((), device=self.model.device), 0.0
        for n, target in enumerate(known):
            logits = branches.answer_rows(read.logits, n)
            kl = divergence(target, logits, goal.temperature).sum() * goal.temperature**2
            told += float(kl.detach())
            total = total + goal.kl * kl
            if goal.ce:
                total = total + goal.ce * cross_entropy(target, logits).sum()
            if goal.dense and target.hidden is not None:
                total = total + goal.dense * len(target.answer) * state_error(target.hidden, read.hidden, n)
        return total, told

    def _summed(self, tally: Tally, bad: bool) -> bool:
        """Sums over all processes; whether any of them met something that is not finite."""
        names = ("loss", "kl", "tokens", "questions", "empty")
        own = torch.tensor([*(getattr(tally, name) for name in names), float(bad)], dtype=torch.float64)
        *sums, anywhere = self.world.add(own.to(self.world.device)).tolist()
        for name, value in zip(names, sums, strict=True):
            setattr(tally, name, type(getattr(tally, name))(value))
        return bool(anywhere)


class _NotFiniteError(Exception):
    """A loss of the lesson of that name."""


def answered(targets: Sequence[Target], stop_ids: frozenset[int]) -> list[int]:
    """Indices of the questions to which the teacher says more than the end token, which would teach nothing."""
    return [n for n, each in enumerate(targets) if each.answer[0] not in stop_ids]
