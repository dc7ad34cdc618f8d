"""Tiny training runs: a random model, short documents, and what two runs have in common if they are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvquilt.model.language_model import LanguageModel
from kvquilt.prompt import Document
from kvquilt.template import PromptTemplate
from kvquilt.training.config import TrainConfig
from kvquilt.training.exercise import Exercise
from kvquilt.training.folder import RunFolder
from kvquilt.training.objective import Objective
from kvquilt.training.shape import Shape
from kvquilt.training.trainer import Trainer
from tests.models import tiny

SMALL = TrainConfig(
    "joint", Shape(rank=2, header=2, trailer=1), objective=Objective(dense=0.5), epochs=2, batch=2, new_tokens=3,
    lr=1e-2, validate_every=2, top=8, shuffle=True,
)  # fmt: skip


def exercises(count: int, first: int = 0, documents: int = 2, questions: int = 2) -> list[Exercise]:
    made = []
    for n in range(first, first + count):
        texts = [Document(f"Cat {n}{k} likes box {n * k + 3}.", id=f"{n}-{k}") for k in range(documents)]
        made.append(Exercise(tuple(texts), tuple(f"Which box does cat {n}{k} like?" for k in range(questions))))
    return made


def trainer(folder: Path, config: TrainConfig = SMALL, model: LanguageModel | None = None, **given: Any) -> Trainer:
    loaded = tiny() if model is None else model
    given.setdefault("exercises", exercises(5))
    given.setdefault("held_out", exercises(1, 9))
    given.setdefault("save_every", 2)
    return Trainer(loaded, PromptTemplate(loaded.tokenizer, "Be brief."), config, folder=folder, **given)


def without(config: TrainConfig = SMALL, **changes: Any) -> TrainConfig:
    """A quicker configuration, with changes."""
    return replace(config, **{"objective": Objective(), "validate_every": 0, "shuffle": False, **changes})


class StoppedError(Exception):
    """A run that was ended from outside."""


def stop_after(step: int) -> Callable[[Any], None]:
    def report(progress: Any) -> None:
        if progress.step == step:
            raise StoppedError

    return report


def values(made: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.named.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logged(folder: Path) -> list[dict[str, Any]]:
    """The log without times."""
    return [{k: v for k, v in line.items() if k not in ("seconds", "remaining", "stages")} for line in _lines(folder)]


def _lines(folder: Path) -> Sequence[dict[str, Any]]:
    return RunFolder(folder).lines()
