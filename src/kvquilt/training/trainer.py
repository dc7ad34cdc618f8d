"""Self-distillation of a writer: the model with the whole context teaches the model that reads compiled documents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvquilt.errors import InputError, StoreUnavailableError
from kvquilt.identity import digest_fields
from kvquilt.model.language_model import LanguageModel
from kvquilt.template import PromptTemplate
from kvquilt.training.artefact import Artefact
from kvquilt.training.components import Components
from kvquilt.training.config import TrainConfig
from kvquilt.training.exercise import Exercise
from kvquilt.training.folder import RunFolder
from kvquilt.training.learner import Learner
from kvquilt.training.lesson import Lesson, lesson
from kvquilt.training.progress import Progress
from kvquilt.training.resume import Place, load_place
from kvquilt.training.schedule import Schedule
from kvquilt.training.sitting import Sitting
from kvquilt.training.targets import Targets
from kvquilt.training.teacher import Teacher
from kvquilt.training.validation import Validation
from kvquilt.training.world import World

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Trainer:
    """Trains a writer's parts on a frozen model and leaves the writer in `folder`, again at every new best.

    A run that was stopped, by whatever, goes on where its last saved step ended and gives what an uninterrupted one
    gives. With several processes (`World`) each computes its share of a step; the outcome is that of one, up to
    rounding.

    Attributes:
        exercises: what is trained on; `held_out` is only measured, and chooses the best parts.
        folder: of the artefact, the log and what a resumed run needs; see `RunFolder`.
        targets: where the teacher's targets are kept; by default in `folder`. Runs over the same data may share it.
        start: tensors to begin with instead of fresh ones, named as in `Components`; of some parts, or of all.
        save_every: steps between two saved states.
        place: where the run stands, from `train` on.
    """

    model: LanguageModel
    template: PromptTemplate
    config: TrainConfig
    exercises: Sequence[Exercise]
    held_out: Sequence[Exercise]
    folder: Path
    targets: Path | None = None
    start: Mapping[str, torch.Tensor] | None = None
    save_every: int = 10
    world: World = field(default_factory=World.found)
    place: Place | None = field(init=False, default=None)

    def train(self, report: Callable[[Progress], object] | None = None) -> Components:
        """Run to the end; the parts with the lowest validation KL, the last ones where nothing is held out.

        Args:
            report: called after every step. What it raises ends the run, which can go on from there.

        Raises:
            InputError: nothing to train on, an exercise that does not fit, fewer exercises in a step than processes, a
                folder of another configuration or one that another process trains into; a teacher that answers
                nothing.
            UnsupportedModelError: the model has no linear layer of a name that the adapter is to be on.
            NumericsError: a loss that is NaN; names the exercises. The last good state stays.
            StoreUnavailableError: the folder cannot be written. The last saved state stays.
            IntegrityError: the saved state is damaged.
        """
        lessons, held = self._lessons(self.exercises, "exercise"), self._lessons(self.held_out, "held-out exercise")
        if not lessons:
            raise InputError("exercises", "at least one is needed")
        if self.config.batch < self.world.size:
            raise InputError(
                "batch", f"at least one exercise for each of {self.world.size} processes", self.config.batch
            )
        files = RunFolder(self.folder)
        with files.held() if self.world.main else nullcontext():
            sitting = self._sitting(files, lessons, held)
            try:
                sitting.begin()
                while sitting.place.step < sitting.schedule.steps:
                    progress = sitting.step()
                    if progress.step % self.save_every == 0:
                        sitting.save()
                    if report is not None and self.world.main:
                        report(progress)
            except BaseException:
                try:
                    sitting.save()
                except StoreUnavailableError as error:
                    log.warning("%s", error)
                raise
            finally:
                self.place = sitting.place
            sitting.save()
            sitting.end()
        return sitting.components

    def _sitting(self, files: RunFolder, lessons: Sequence[Lesson], held: Sequence[Lesson]) -> Sitting:
        """The run as its last saved step left it, or new."""
        config, model = self.config, self.model
        if self.start is None:
            components = Components.fresh(model, config.shape, config.seed, config.trained)
        else:
            components = Components.begun(model, config.shape, config.seed, self.start, config.trained)
        run: dict[str, object] = {
            "config": config.as_dict(),
            "model": model.fingerprint.digest,
            "exercises": _digest(lessons),
            "held-out exercises": _digest(held),
            "start": components.digest,
        }
        place = Place(run)
        if files.state.exists():
            place = load_place(files.state)
            self._check(place.run, run)
        teacher = Teacher(config.new_tokens, config.top, hidden=config.objective.dense > 0)
        kept = (self.targets or files.targets) if config.keep_targets else None
        targets = Targets(model, teacher, kept)
        prefix = self.template.opening if config.shared_prefix else ()
        student = config.shape.pupil(model, prefix, not config.checkpointing)
        plain = self.start is None and config.shape.plain
        return Sitting(
            lessons,
            Schedule(config, len(lessons)),
            Learner(model, config, student, targets, components, self.world),
            Validation(model, held, targets, self.world) if held else None,
            files,
            Artefact(self.folder, model, config, prefix, plain),
            place,
        )

    def _lessons(self, exercises: Sequence[Exercise], what: str) -> list[Lesson]:
        new, around = self.config.new_tokens, self.config.shape.rows
        return [
            lesson(f"{what} {n}", each, self.template, self.model.capability, new + around * len(each.documents))
            for n, each in enumerate(exercises)
        ]

    def _check(self, stored: dict[str, object], mine: dict[str, object]) -> None:
        config = stored.get("config")
        differing = self.config.differences(config if isinstance(config, dict) else {})
        differing += [name for name in mine if name != "config" and mine[name] != stored.get(name)]
        if differing:
            names = ", ".join(differing)
            rule = (
                f"holds a run of another configuration: it differs in {names}. Repeat that run's command to go on with "
                f"it, or choose another folder"
            )
            raise InputError("out", rule, str(self.folder))


def _digest(lessons: Sequence[Lesson]) -> str:
    return digest_fields("kvquilt 2026-11 lessons v1", [("lesson", each.digest) for each in lessons])
