"""What every kind of writer is to its trainer: parameters by name, and a student that reads with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from kvquilt.model.graph import Read
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts
from kvquilt.training.begun import Begun
from kvquilt.training.lesson import Lesson
from kvquilt.training.teacher import Branches

Orders = Sequence[Sequence[int]]  # by lesson, in which order its documents stand


class Pupil(Protocol):
    """Does what serving does, with gradients.

    Attributes:
        passes: how often `learn` reads a lesson, and so calls its loss.
    """

    @property
    def passes(self) -> int: ...

    def read(
        self,
        parts: Parts,
        lessons: Sequence[Lesson],
        branches: Sequence[Branches],
        hidden: bool = False,
        orders: Orders | None = None,
    ) -> list[Read]:
        """What it says to every lesson's branches.

        Args:
            hidden: note the hidden states that leave every layer.
            orders: as given by default.
        """
        ...

    def learn(
        self,
        parts: Parts,
        lessons: Sequence[Lesson],
        branches: Sequence[Branches],
        loss: Callable[[int, Read], torch.Tensor],
        hidden: bool = False,
        orders: Orders | None = None,
    ) -> None:
        """Add to the gradients of `parts` those of the sum of ``loss(lesson's index, its read)``.

        If `loss` raises, what was asked before may have left gradients; nothing else has changed.
        """
        ...


class Savable(Protocol):
    """A writer, or whatever serves in its place, that can be left in a folder."""

    def save(self, path: Path, recipe: Mapping[str, Any] = ..., metrics: Mapping[str, Any] = ...) -> str: ...


class Trainable(Protocol):
    """Sizes of a kind of writer, a frozen dataclass of plain values."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the parts that are there; each can be trained or not."""
        ...

    @property
    def plain(self) -> bool:
        """A fresh one changes nothing: it is pure reuse."""
        ...

    @property
    def rows(self) -> int:
        """Rows that each document takes in a prompt beside its own tokens."""
        ...

    def kind_of(self, name: str) -> str:
        """Of `kinds`, that of the tensor of that name."""
        ...

    def soft(self, name: str) -> bool:
        """The tensor of that name learns at the rate of soft tokens: its values are few and may move fast."""
        ...

    def sized(self, start: Begun) -> Trainable:
        """The same, whose parts have the sizes that they have there, as far as they are there."""
        ...

    def drawn(self, model: LanguageModel, seed: int) -> dict[str, torch.Tensor]:
        """Tensors to begin with, fp32, on the model's device, in a fixed order.

        Raises:
            InputError, UnsupportedModelError: the model has no place for them.
        """
        ...

    def parts(self, named: Mapping[str, torch.Tensor]) -> Parts:
        """For a forward; shares the tensors."""
        ...

    def pupil(self, model: LanguageModel, prefix: tuple[int, ...], keep_all: bool) -> Pupil:
        """What is trained.

        Args:
            prefix: ids that documents are encoded behind.
            keep_all: no KV gradient checkpointing.

        Raises:
            InputError: documents of this kind are not encoded behind anything.
        """
        ...

    def writer(
        self,
        kind: str,
        model: LanguageModel,
        named: Mapping[str, torch.Tensor],
        prefix: tuple[int, ...],
        base_name: str,
    ) -> Savable:
        """A copy of the tensors, ready to serve."""
        ...
