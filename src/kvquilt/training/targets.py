"""Teacher targets computed once and kept: one file per lesson, whoever trains on it next."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from kvquilt.errors import NumericsError
from kvquilt.files import write_atomically, writing
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.model.language_model import LanguageModel
from kvquilt.training.lesson import Lesson
from kvquilt.training.teacher import Target, Teacher

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Targets:
    """What the teacher says, from `folder` if it said so before.

    Attributes:
        folder: None keeps nothing: every step asks the teacher again.
    """

    model: LanguageModel
    teacher: Teacher
    folder: Path | None

    def of(self, lesson: Lesson) -> list[Target]:
        """See `Teacher.targets`. A damaged file is written anew.

        Raises:
            NumericsError: the model produced NaN; names the lesson.
            StoreUnavailableError: the folder cannot be written.
        """
        if self.folder is None:
            return self._asked(lesson)
        path = self.folder / f"{self.digest(lesson)}.safetensors"
        try:
            return _unpacked(load(path.read_bytes()), len(lesson.questions))
        except (FileNotFoundError, SafetensorError, KeyError) as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("%s is damaged; the teacher is asked again", path)
            made = self._asked(lesson)
            with writing(path):
                # private: these are answers about the documents, which nobody but a training run reads
                write_atomically(path, save(_packed(made)), private=True)
            return made

    def _asked(self, lesson: Lesson) -> list[Target]:
        try:
            return self.teacher.targets(self.model, lesson)
        except NumericsError as error:
            raise NumericsError(f"the teacher on {lesson.name}: {error}") from error

    def digest(self, lesson: Lesson) -> str:
        """Of everything that the targets depend on."""
        ids: list[tuple[str, bytes | str | None]] = [("opening", encode_ids(lesson.opening))]
        ids += [("document", encode_ids(each)) for each in lesson.documents]
        ids += [("question", encode_ids(each)) for each in lesson.questions]
        teacher = [("model", self.model.fingerprint.digest), ("teacher", repr(self.teacher))]
        return digest_fields("kvquilt 2026-11 teacher targets v1", [*teacher, *ids])


def _packed(targets: list[Target]) -> dict[str, torch.Tensor]:
    out = {}
    for n, each in enumerate(targets):
        out[f"{n}.answer"] = torch.tensor(each.answer, dtype=torch.int32)
        # copies: rows of a larger tensor would be refused
        out |= {f"{n}.{name}": getattr(each, name).clone() for name in ("top", "log_probs", "log_rest")}
        if each.hidden is not None:
            out[f"{n}.hidden"] = each.hidden.clone()
    return out


def _unpacked(tensors: dict[str, torch.Tensor], count: int) -> list[Target]:
    return [
        Target(
            tuple(tensors[f"{n}.answer"].tolist()),
            tensors[f"{n}.top"],
            tensors[f"{n}.log_probs"],
            tensors[f"{n}.log_rest"],
            tensors.get(f"{n}.hidden"),
        )
        for n in range(count)
    ]
