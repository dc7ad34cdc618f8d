"""Self-distillation of a writer: the model with the whole context teaches the model that reads compiled documents."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvquilt.errors import InputError, NumericsError
from kvquilt.model.graph import frozen
from kvquilt.model.language_model import LanguageModel
from kvquilt.template import PromptTemplate
from kvquilt.training.components import Components
from kvquilt.training.config import TrainConfig
from kvquilt.training.exercise import Exercise
from kvquilt.training.lesson import Lesson, lesson
from kvquilt.training.objective import cross_entropy, divergence, state_error
from kvquilt.training.resume import load_state, save_state
from kvquilt.training.student import Student
from kvquilt.training.targets import Targets
from kvquilt.training.teacher import Branches, Target, Teacher


@dataclass(frozen=True, slots=True)
class Progress:
    """One optimizer step.

    Attributes:
        loss: of the objective, per answer token; `kl` of it in nats.
        validation: KL per answer token on held-out exercises, where it was measured at this step.
        seconds: since the run began, earlier sittings included; `remaining` is an estimate.
        stages: seconds of this step by stage: teacher, forward, backward.
    """

    step: int
    steps: int
    loss: float
    kl: float
    lr: float
    tokens: int
    questions: int
    seconds: float
    remaining: float
    stages: dict[str, float]
    validation: float | None = None


@dataclass(eq=False, slots=True)
class Trainer:
    """Trains a writer's parts on a frozen model and leaves them in `folder`.

    A run that was stopped, by whatever, goes on where its last saved step ended and gives what an uninterrupted one
    gives: order and shuffles depend on seed and step alone.

    Attributes:
        exercises: what is trained on; `held_out` is only measured.
        folder: of the artefact, the log (``log.jsonl``) and what a resumed run needs (``state.safetensors``).
        targets: where the teacher's targets are kept; by default in `folder`. Runs over the same data may share it.
        start: parts to begin with instead of fresh ones.
    """

    model: LanguageModel
    template: PromptTemplate
    config: TrainConfig
    exercises: Sequence[Exercise]
    held_out: Sequence[Exercise]
    folder: Path
    targets: Path | None = None
    start: Components | None = None
    save_every: int = 10
    components: Components = field(init=False)
    _best: dict[str, torch.Tensor] = field(init=False, default_factory=dict, repr=False)

    def train(self, report: Callable[[Progress], object] | None = None) -> Components:
        """Run to the end; the parts with the lowest validation KL.

        Raises:
            InputError: nothing to train on, an exercise that does not fit, or a folder of another configuration.
            NumericsError: a loss that is NaN; names the exercises. The last good state stays.
        """
        config, model = self.config, self.model
        lessons, held = self._lessons(self.exercises, "exercise"), self._lessons(self.held_out, "held-out exercise")
        if not lessons:
            raise InputError("exercises", "at least one is needed")
        self.components = self.start or Components.fresh(model, config.shape, config.seed)
        optimizer = self._optimizer()
        per_epoch = math.ceil(len(lessons) / config.batch)
        steps = min(config.steps or config.epochs * per_epoch, config.epochs * per_epoch)
        place: dict[str, Any] = {
            "step": 0,
            "seconds": 0.0,
            "best": None,
            "start": None,
            "config": config.as_dict(),
            "lessons": len(lessons),
        }
        path = self.folder / "state.safetensors"
        if path.exists():
            place, self._best = load_state(path, self.components.trained, optimizer)
            self._check(place, len(lessons))
        student = Student(
            model,
            config.shape.header,
            config.shape.trailer,
            self.template.opening if config.shared_prefix else (),
            keep_all=not config.checkpointing,
        )
        teacher = Teacher(config.new_tokens, config.top, hidden=config.objective.dense > 0)
        kept = (self.targets or self.folder / "targets") if config.keep_targets else None
        targets = Targets(model, teacher, kept)
        began, before = time.perf_counter(), place["seconds"]
        first = place["step"]
        if held and place["start"] is None:
            place["start"] = self.validate(held, student, targets)  # an adapter starts as pure reuse
        try:
            for step in range(first, steps):
                made = self._step(step, steps, per_epoch, lessons, student, targets, optimizer)
                place["step"] = step + 1
                due = step + 1 == steps or (config.validate_every and (step + 1) % config.validate_every == 0)
                validation = self.validate(held, student, targets) if held and due else None
                if validation is not None and (place["best"] is None or validation < place["best"]):
                    place["best"] = validation
                    self._best = {n: p.detach().clone() for n, p in self.components.named.items()}
                spent = time.perf_counter() - began
                place["seconds"] = before + spent
                left = spent / (step + 1 - first) * (steps - step - 1)
                progress = Progress(**made, seconds=place["seconds"], remaining=left, validation=validation)
                self._log(progress)
                if (step + 1) % self.save_every == 0:
                    save_state(path, self.components.trained, self._best, optimizer, place)
                if report is not None:
                    report(progress)
        finally:
            if place["step"] > first:
                save_state(path, self.components.trained, self._best, optimizer, place)
        if self._best:
            with torch.no_grad():
                for name, p in self.components.named.items():
                    p.copy_(self._best[name])
        return self.components

    def validate(self, held: Sequence[Lesson], student: Student, targets: Targets) -> float:
        """KL per answer token, in nats, over held-out lessons."""
        total, tokens = 0.0, 0
        with frozen(self.model), torch.no_grad():
            for each in held:
                known = targets.of(each)
                branches = Branches.of(each.questions, [t.answer for t in known])
                (read,) = student.read(self.components.parts(), [each], [branches])
                for n, target in enumerate(known):
                    total += float(divergence(target, branches.answer_rows(read.logits, n)).sum())
                    tokens += len(target.answer)
        return total / tokens

    def _lessons(self, exercises: Sequence[Exercise], what: str) -> list[Lesson]:
        return [
            lesson(f"{what} {n}", each, self.template, self.model.capability, self.config.new_tokens)
            for n, each in enumerate(exercises)
        ]

    def _optimizer(self) -> torch.optim.Optimizer:
        soft = [p for name, p in self.components.trained.items() if "lora_" not in name]
        others = [p for name, p in self.components.trained.items() if "lora_" in name]
        groups = [{"params": p, "lr": lr} for p, lr in ((others, self.config.lr), (soft, self.config.lr_soft)) if p]
        return torch.optim.AdamW(groups, weight_decay=0.0)

    def _step(
        self,
        step: int,
        steps: int,
        per_epoch: int,
        lessons: Sequence[Lesson],
        student: Student,
        targets: Targets,
        optimizer: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        config = self.config
        epoch, at = divmod(step, per_epoch)
        order = random.Random(f"{config.seed} epoch {epoch}").sample(range(len(lessons)), len(lessons))
        chosen = [lessons[i] for i in order[at * config.batch : (at + 1) * config.batch]]
        stages = {"teacher": 0.0, "forward": 0.0, "backward": 0.0}
        started = time.perf_counter()
        known = [targets.of(each) for each in chosen]
        stages["teacher"] = time.perf_counter() - started
        tokens = sum(len(t.answer) for each in known for t in each)
        scale = 1 / tokens if config.normalise == "token_mean" else 1.0
        draw = random.Random(f"{config.seed} order {step}")
        loss, kl = 0.0, 0.0
        with frozen(self.model):
            for first in range(0, len(chosen), config.micro_batch):
                part = slice(first, first + config.micro_batch)
                started = time.perf_counter()
                total, told = self._loss(chosen[part], known[part], student, draw)
                stages["forward"] += time.perf_counter() - started
                if not math.isfinite(float(total.detach())):
                    names = ", ".join(each.name for each in chosen[part])
                    raise NumericsError(
                        f"the loss is {float(total.detach())} on {names} at step {step + 1}; nothing was updated"
                    )
                started = time.perf_counter()
                (total * scale).backward()
                stages["backward"] += time.perf_counter() - started
                loss, kl = loss + float(total.detach()), kl + told
        for group, base in zip(optimizer.param_groups, self._rates(), strict=True):
            group["lr"] = base * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        return {
            "step": step + 1,
            "steps": steps,
            "loss": loss / tokens,
            "kl": kl / tokens,
            "lr": optimizer.param_groups[0]["lr"],
            "tokens": tokens,
            "questions": sum(len(each.questions) for each in chosen),
            "stages": stages,
        }

    def _rates(self) -> list[float]:
        """As in `_optimizer`."""
        names = self.components.trained
        adapter = any("lora_" in n for n in names)
        soft = any("lora_" not in n for n in names)
        return [lr for lr, there in ((self.config.lr, adapter), (self.config.lr_soft, soft)) if there]

    def _loss(
        self, lessons: Sequence[Lesson], known: Sequence[list[Target]], student: Student, draw: random.Random
    ) -> tuple[torch.Tensor, float]:
        """The objective summed over answer tokens, and its KL."""
        goal = self.config.objective
        branches = [Branches.of(each.questions, [t.answer for t in k]) for each, k in zip(lessons, known, strict=True)]
        orders = None
        if self.config.shuffle:
            orders = [draw.sample(range(len(each.documents)), len(each.documents)) for each in lessons]
        reads = student.read(self.components.parts(), lessons, branches, goal.dense > 0, orders)
        total, told = torch.zeros((), device=self.model.device), 0.0
        for read, mine, targets in zip(reads, branches, known, strict=True):
            for n, target in enumerate(targets):
                logits = mine.answer_rows(read.logits, n)
                kl = divergence(target, logits, goal.temperature).sum() * goal.temperature**2
                told += float(kl.detach())
                total = total + goal.kl * kl
                if goal.ce:
                    total = total + goal.ce * cross_entropy(target, logits).sum()
                if goal.dense and target.hidden is not None:
                    total = total + goal.dense * len(target.answer) * state_error(target.hidden, read.hidden, n)
        return total, told

    def _check(self, place: dict[str, Any], lessons: int) -> None:
        differing = self.config.differences(place["config"])
        if place["lessons"] != lessons:
            differing.append("exercises")
        if differing:
            raise InputError("folder", f"holds a run of another configuration; it differs in {', '.join(differing)}")

    def _log(self, progress: Progress) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        line = {name: getattr(progress, name) for name in progress.__slots__}
        with (self.folder / "log.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")
