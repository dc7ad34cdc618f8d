"""A training run while it goes on: parameters, optimizer, place, best parts, and how they move by one step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter

import torch

from kvquilt.errors import InputError
from kvquilt.training.artefact import Artefact
from kvquilt.training.components import Components
from kvquilt.training.folder import RunFolder
from kvquilt.training.learner import Learner, Tally
from kvquilt.training.lesson import Lesson
from kvquilt.training.progress import Progress, Start
from kvquilt.training.resume import Place, load_state, save_state
from kvquilt.training.schedule import Schedule
from kvquilt.training.validation import Validation

log = logging.getLogger(__name__)
Named = dict[str, torch.Tensor]


@dataclass(eq=False, slots=True)
class Sitting:
    """Everything that a step changes. `place` is replaced in one assignment, so it never tells of half a step.

    Attributes:
        validation: None if nothing is held out.
        best: the parts with the lowest validation KL so far, copied.
        clean: parameters are those of `place.step`; not so while the optimizer is at work.
    """

    lessons: Sequence[Lesson]
    schedule: Schedule
    learner: Learner
    validation: Validation | None
    files: RunFolder
    artefact: Artefact
    place: Place
    clean: bool = field(init=False, default=True)
    best: Named = field(init=False, default_factory=dict, repr=False)
    _optimizer: torch.optim.Optimizer = field(init=False, repr=False)
    _saved: Place | None = field(init=False, default=None)
    _began: tuple[float, float, int] = field(init=False, default=(0.0, 0.0, 0))  # clock, seconds, steps done before

    def __post_init__(self) -> None:
        config, trained = self.schedule.config, self.components.trained
        soft = [p for name, p in trained.items() if config.shape.soft(name)]
        others = [p for name, p in trained.items() if not config.shape.soft(name)]
        groups = [{"params": p, "lr": lr, "rate": lr} for p, lr in ((others, config.lr), (soft, config.lr_soft)) if p]
        self._optimizer = torch.optim.AdamW(groups, weight_decay=0.0)

    @property
    def components(self) -> Components:
        return self.learner.components

    @property
    def main(self) -> bool:
        return self.learner.world.main

    def begin(self) -> None:
        """Put back what was saved, and finish what was not: the first validation, or that of the last step."""
        resumed = self.files.state.exists()
        if resumed:
            self.best = load_state(self.files.state, self.components.trained, self._optimizer)
            self._saved = self.place
        self.learner.world.wait()
        if self.main:
            self.files.back_to(self.place.step - (self.place.due is not None) if resumed else -1)
        if self.validation is not None and self.place.before is None:
            self._measure(self.validation)
        if self.place.due is not None:
            self.finish(Progress(**self.place.due))
        self._began = perf_counter(), self.place.seconds, self.place.step

    def step(self) -> Progress:
        """One optimizer step, from the teacher's targets to the line in the log."""
        step, place = self.place.step, self.place
        chosen = [self.lessons[i] for i in self.schedule.chosen(step)]
        self._optimizer.zero_grad()
        tally = self.learner.learn(chosen, self.schedule.orders(step, chosen))
        for group in self._optimizer.param_groups:
            group["lr"] = group["rate"] * self.schedule.falls(step)
        self.clean = False
        if tally.tokens:
            self._optimizer.step()
        progress = self._progress(tally)
        self.place = replace(place, step=step + 1, seconds=progress.seconds, due=progress.as_dict())
        self.clean = True
        return self.finish(progress)

    def finish(self, progress: Progress) -> Progress:
        """Validate if it is time, publish what is best, log. A sitting that ends within makes the next do it again."""
        # counted first: where the teacher answers nothing, nothing is published
        place, every = self._counted(self.place, progress), self.schedule.config.validate_every
        if progress.step == self.schedule.steps or (every and progress.step % every == 0):
            value = None
            if self.validation is not None:
                value = self.validation.of(self.learner.student, self.components.parts())
                progress = replace(progress, validation=value)
            if value is None or place.best is None or value < place.best:
                self.best = self._copies()
                place = replace(place, best=value, best_step=progress.step)
                if self.main:
                    self.artefact.publish(self.best, place)
        if self.main:
            self.files.note(progress.as_dict())
        self.place = replace(place, due=None)
        return progress

    def save(self) -> None:
        """Leave a state to go on from, unless it is there.

        Raises:
            StoreUnavailableError: it cannot be written; what was saved before stays.
        """
        begun = self.place.step or self.place.before is not None
        if self.main and self.clean and begun and self.place is not self._saved:
            save_state(self.files.state, self.components.trained, self.best, self._optimizer, self.place)
            self._saved = self.place

    def end(self) -> None:
        """Publish, and leave in the components, what is best."""
        if self.main:
            self.artefact.publish(self.best or self._copies(), self.place)
        with torch.no_grad():
            for name, tensor in self.best.items():
                self.components.named[name].copy_(tensor)
        if self.place.best is not None and not self.place.best_step:
            log.warning("no step brought held-out exercises nearer to full prefill than the start is: it was kept")

    def _measure(self, validation: Validation) -> None:
        """Where held-out exercises stand before the first step."""
        now = validation.of(self.learner.student, self.components.parts())
        start = Start(
            now, now if self.artefact.plain_start else validation.none(self.artefact.prefix), validation.full()
        )
        if self.main:
            self.files.note(start.as_dict())
        self.best = self._copies()
        self.place = replace(self.place, before=asdict(start), best=now)

    def _progress(self, tally: Tally) -> Progress:
        began, before, first = self._began
        step, spent, tokens = self.place.step + 1, perf_counter() - began, max(1, tally.tokens)
        return Progress(
            step=step,
            steps=self.schedule.steps,
            loss=tally.loss / tokens,
            kl=tally.kl / tokens,
            lr=self._optimizer.param_groups[0]["lr"],
            tokens=tally.tokens,
            questions=tally.questions,
            seconds=before + spent,
            remaining=spent / (step - first) * (self.schedule.steps - step),
            stages=tally.stages,
            empty=tally.empty,
        )

    def _counted(self, place: Place, progress: Progress) -> Place:
        """Questions without an answer, counted in the first epoch, in which each comes once."""
        if progress.step > self.schedule.per_epoch:
            return place
        empty, asked = place.empty + progress.empty, place.asked + progress.empty + progress.questions
        if progress.step == min(self.schedule.per_epoch, self.schedule.steps) and empty:
            if empty == asked:
                raise InputError("data", "the model answers nothing to any of the questions: there is nothing to learn")
            log.warning(
                "the model answers nothing to %d of %d questions; they teach nothing, so they are left out",
                empty,
                asked,
            )
        return replace(place, empty=empty, asked=asked)

    def _copies(self) -> Named:
        return {name: p.detach().clone() for name, p in self.components.named.items()}
