"""How far a student is from the teacher on exercises that nobody trains on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvquilt.errors import InputError, NumericsError
from kvquilt.model.graph import frozen, read
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import PLAIN, Parts
from kvquilt.training.learner import answered
from kvquilt.training.lesson import Lesson
from kvquilt.training.objective import divergence
from kvquilt.training.student import Student
from kvquilt.training.targets import Targets
from kvquilt.training.teacher import Branches
from kvquilt.training.trainable import Pupil
from kvquilt.training.world import World
from kvquilt.writers.prefix_cache import PrefixCache

_Logits = Callable[[Lesson, Branches], torch.Tensor]  # of a lesson's branches, the last `Branches.tail` rows


@dataclass(frozen=True, eq=False, slots=True)
class Validation:
    """KL per answer token, in nats, over held-out lessons; questions without an answer do not count."""

    model: LanguageModel
    held: Sequence[Lesson]
    targets: Targets
    world: World

    def of(self, student: Pupil, parts: Parts) -> float:
        """That of a writer.

        Raises:
            InputError: the teacher answers none of the questions.
        """

        def logits(each: Lesson, branches: Branches) -> torch.Tensor:
            return student.read(parts, [each], [branches])[0].logits

        return self._mean(logits)

    def none(self, prefix: tuple[int, ...]) -> float:
        """That of pure reuse of documents that are encoded behind `prefix`."""
        return self.of(Student(self.model, prefix=prefix, keep_all=True), PLAIN)

    def full(self) -> float:
        """That of full prefill, read as the student reads: what is left is rounding."""

        def logits(each: Lesson, branches: Branches) -> torch.Tensor:
            with PrefixCache(self.model) as prefix:
                slots = prefix.copied(each.read)
            return read(self.model, branches.ids, branches.plan(len(each.read)), slots, branches.tail).logits

        return self._mean(logits)

    def _mean(self, logits: _Logits) -> float:
        sums = torch.zeros(2, dtype=torch.float64)
        with frozen(self.model), torch.no_grad():
            for each in self.world.share(self.held):
                known = self.targets.of(each)
                kept = answered(known, self.model.stop_ids)
                if not kept:
                    continue
                left = replace(each, questions=tuple(each.questions[n] for n in kept))
                branches = Branches.of(left.questions, [known[n].answer for n in kept])
                found = logits(left, branches)
                for n, target in enumerate(known[k] for k in kept):
                    kl = divergence(target, branches.answer_rows(found, n))
                    sums += torch.tensor([float(kl.sum()), len(kl)], dtype=torch.float64)
        total, tokens = self.world.add(sums.to(self.world.device)).tolist()
        if not tokens:
            raise InputError("data", "the model answers nothing to any held-out question: there is nothing to learn")
        if not math.isfinite(total):
            raise NumericsError("the KL on held-out exercises is not finite")
        return float(total / tokens)
