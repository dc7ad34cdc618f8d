"""From what a user names, a folder, a JSONL file or a task, to exercises."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from kvquilt.errors import InputError, nearest
from kvquilt.evaluation.tasks.biography import SYSTEM as BIOGRAPHY
from kvquilt.evaluation.tasks.biography import BiographyTask
from kvquilt.evaluation.tasks.help_topics import HelpTopics
from kvquilt.evaluation.tasks.hotpotqa import HotpotQA
from kvquilt.evaluation.tasks.leakage import check_documents_apart
from kvquilt.model.language_model import LanguageModel
from kvquilt.passages import Passages
from kvquilt.template import PromptTemplate
from kvquilt.training.asking import Asker
from kvquilt.training.data import Data, Report, Sets, asked_data, divided, split_exercises
from kvquilt.training.exercise import Exercise
from kvquilt.training.jsonl import read_exercises
from kvquilt.training.lesson import lesson

TASKS = ("biography", "hotpotqa", "help-topics")


@dataclass(frozen=True, slots=True)
class Source:
    """What ``--data`` names.

    Attributes:
        task: of `TASKS`, or "".
        path: the folder or file; of the task ``hotpotqa`` too.
    """

    task: str = ""
    path: Path | None = None

    @classmethod
    def parse(cls, written: str) -> Source:
        """``task:biography``, ``task:hotpotqa=PATH``, ``task:help-topics``, or a path.

        Raises:
            InputError: an unknown task, a path that is not there, a task's path too many or missing.
        """
        if not written.startswith("task:"):
            path = Path(written)
            if not path.exists():
                raise InputError("data", "no such folder or file, and no task: name", written)
            return cls("", path)
        task, given, path_written = written.removeprefix("task:").partition("=")
        if task not in TASKS:
            raise InputError("data", f"no such task{nearest(task, TASKS)}", task)
        if bool(given) != (task == "hotpotqa") or (given and not path_written):
            raise InputError("data", "task:hotpotqa=PATH names its file, other tasks none", written)
        return cls(task, Path(path_written) if given else None)

    @property
    def jsonl(self) -> bool:
        return not self.task and self.path is not None and self.path.suffix.lower() in (".jsonl", ".ndjson")

    @property
    def system(self) -> str | None:
        """The task's own system message; None for the engine's."""
        return {"biography": BIOGRAPHY, "hotpotqa": HotpotQA.SYSTEM}.get(self.task)

    @property
    def documents(self) -> tuple[int, ...]:
        """In a set, if nobody says."""
        return {"biography": (2, 3, 5, 7), "hotpotqa": (5,)}.get(self.task, (4,))


@dataclass(frozen=True, eq=False, slots=True)
class Reading:
    """What reading a source needs.

    Attributes:
        passages: reads a folder or file of plain documents.
        length: measures a text in tokens; `limit` of a task's paragraph.
        questions: where what the model asked is kept.
        room: tokens that must fit behind a question.
        refused: documents that no question is made about; see `kvquilt.evaluation.tasks.leakage`.
    """

    model: LanguageModel
    template: PromptTemplate
    sets: Sets
    passages: Callable[[Path], Passages]
    length: Callable[[str], int]
    limit: int
    room: int
    questions: Path | None = None
    progress: Report | None = None
    refused: frozenset[str] = frozenset()

    def read(self, source: Source, validation: Path | None = None) -> Data:
        """The exercises.

        Args:
            validation: JSONL of held-out exercises, instead of a share of the source's own.

        Raises:
            InputError: says what is wrong with the data, before anything is computed.
            LeakageError: a question would be about a document of `refused`.
        """
        if validation is not None:
            held = tuple(read_exercises(validation)[: self.sets.validation])
            return replace(replace(self, sets=replace(self.sets, held_out=0.0)).read(source), held_out=held)
        if source.task == "biography":
            return self._biography()
        if source.task == "hotpotqa" and source.path is not None:
            return self._hotpotqa(HotpotQA.read(source.path))
        if source.jsonl and source.path is not None:
            return split_exercises(read_exercises(source.path), self.sets)
        if source.task == "help-topics":
            topics = HelpTopics()
            held_out = topics.documents("tuning") if self.sets.held_out else []
            return asked_data(topics.documents("train"), held_out, self.sets, self._asker(), self._check, self.progress)
        if source.path is None:
            raise InputError("data", "names neither a task nor a path")
        found = self.passages(source.path).documents
        by_file = [list(group) for _, group in groupby(found, lambda d: d.id.rpartition("#")[0])]
        train, held_out = divided(by_file, self.sets)
        return asked_data(train, held_out, self.sets, self._asker(), self._check, self.progress)

    def _biography(self) -> Data:
        task, sets = BiographyTask(), self.sets
        train = task.exercises("train", sets.count or 256, sets.documents, sets.questions, sets.seed)
        held = task.exercises("tuning", sets.validation, sets.documents, sets.questions, sets.seed)
        return Data(tuple(train), tuple(held) if sets.held_out else ())

    def _hotpotqa(self, task: HotpotQA) -> Data:
        sets = self.sets
        if len(sets.documents) > 1:
            raise InputError("documents", "one number for hotpotqa", sets.documents)

        def exercises(some: HotpotQA, count: int | None) -> tuple[Exercise, ...]:
            made = some.exercises(count, sets.documents[0], sets.seed, limit=self.limit, length=self.length)
            return tuple(made)

        shuffled = random.Random(f"{sets.seed} divide").sample(task.samples, len(task.samples))
        if not sets.held_out:
            return Data(exercises(replace(task, samples=tuple(shuffled)), sets.count), ())
        held = replace(task, samples=tuple(shuffled[: sets.validation]))
        train = replace(task, samples=tuple(shuffled[sets.validation :])).apart_from(held)
        if not train.samples:
            raise InputError("data", "too few samples: none is left to train on", len(task.samples))
        return Data(exercises(train, sets.count), exercises(held, None))

    def _asker(self) -> Asker:
        return Asker(self.model, self.template, max(4, self.sets.questions), self.sets.seed, self.questions)

    def _check(self, exercise: Exercise) -> None:
        lesson("a set", exercise, self.template, self.model.capability, self.room)
        check_documents_apart("data", exercise.documents, self.refused)
