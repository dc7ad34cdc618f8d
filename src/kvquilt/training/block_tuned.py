"""Fine-tuning the reader itself under the block mask, so that it reads what it has compiled apart (Block-Attention,
arXiv 2409.15355), and under the full mask, so that it still reads the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvquilt.errors import InputError
from kvquilt.model.graph import Read
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts
from kvquilt.training.begun import Begun
from kvquilt.training.lesson import Lesson
from kvquilt.training.shape import TARGETS, Shape, adapter
from kvquilt.training.student import Student
from kvquilt.training.teacher import Branches
from kvquilt.training.trainable import Orders
from kvquilt.writers.block_tuned import Tuning, tuned_parts


@dataclass(frozen=True, slots=True)
class TunedShape:
    """Which weights of the reader are trained, and how much the full mask counts. A `Trainable`.

    Attributes:
        rank: of an adapter on all linear layers named `targets`, `alpha` / rank its scaling; 0 trains the decoder
            layers' own weights and the last norm, in fp32 (embeddings and output head stay).
        full_share: weight of the full mask in the loss, from 0 to 1; the block mask has the rest.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = TARGETS
    full_share: float = 0.5

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise InputError("rank", "at least 0", self.rank)
        if self.rank and not self.targets:
            raise InputError("targets", "an adapter needs at least one linear layer")
        if self.rank and not 0 < self.alpha < math.inf:
            raise InputError("alpha", "a finite number above 0", self.alpha)
        if not 0 <= self.full_share <= 1:
            raise InputError("full_share", "between 0 and 1", self.full_share)

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("adapter",) if self.rank else ("weights",)

    @property
    def plain(self) -> bool:
        return True

    @property
    def rows(self) -> int:
        return 0

    def kind_of(self, name: str) -> str:
        return self.kinds[0]

    def soft(self, name: str) -> bool:
        return False

    def sized(self, start: Begun) -> TunedShape:
        if not any("lora_" in name for name in start.named):
            return replace(self, rank=0)
        like = Shape(targets=self.targets).sized(start)
        return replace(self, rank=like.rank, alpha=like.alpha, targets=like.targets)

    def drawn(self, model: LanguageModel, seed: int) -> dict[str, torch.Tensor]:
        """Weights of the model itself, named as below the base model, or an adapter that changes nothing.

        Raises:
            UnsupportedModelError: the model has no linear layer with one of the names.
        """
        if self.rank:
            return adapter(model, self.rank, self.targets, torch.Generator().manual_seed(seed))
        named = model.hf.base_model.named_parameters()
        return {n: p.detach().to(torch.float32, copy=True) for n, p in named if n.startswith(("layers.", "norm."))}

    def parts(self, named: Mapping[str, torch.Tensor]) -> Parts:
        return tuned_parts(named, self.alpha)

    def pupil(self, model: LanguageModel, prefix: tuple[int, ...], keep_all: bool) -> BlockStudent:
        return BlockStudent(model, prefix, keep_all, self.full_share)

    def writer(
        self,
        kind: str,
        model: LanguageModel,
        named: Mapping[str, torch.Tensor],
        prefix: tuple[int, ...],
        base_name: str,
    ) -> Tuning:
        return Tuning.of(model.fingerprint, named, self.alpha, base_name)


@dataclass(eq=False, slots=True)
class BlockStudent:
    """The model under training, which compiles documents apart and reads them: what serving its merged weights does. A
    `Pupil`.

    Attributes:
        prefix: ids that documents are encoded behind.
        keep_all: no KV gradient checkpointing.
        full: weight of the full mask in the loss, between 0 and 1; the block mask has the rest.
    """

    model: LanguageModel
    prefix: tuple[int, ...] = ()
    keep_all: bool = False
    full: float = 0.5

    @property
    def passes(self) -> int:
        return (self.full < 1) + (self.full > 0)

    def read(
        self,
        parts: Parts,
        lessons: Sequence[Lesson],
        branches: Sequence[Branches],
        hidden: bool = False,
        orders: Orders | None = None,
    ) -> list[Read]:
        """Under the block mask."""
        return self._student(self.prefix).read(parts, lessons, branches, hidden, orders)

    def read_whole(
        self,
        parts: Parts,
        lessons: Sequence[Lesson],
        branches: Sequence[Branches],
        hidden: bool = False,
        orders: Orders | None = None,
    ) -> list[Read]:
        """The same under the full mask: what full prefill of the merged weights does."""
        return self._student(()).read(parts, _whole(lessons, orders), branches, hidden)

    def learn(
        self,
        parts: Parts,
        lessons: Sequence[Lesson],
        branches: Sequence[Branches],
        loss: Callable[[int, Read], torch.Tensor],
        hidden: bool = False,
        orders: Orders | None = None,
    ) -> None:
        """Every lesson under both masks by their weights; a mask of weight 0 is left out."""

        def weighted(weight: float) -> Callable[[int, Read], torch.Tensor]:
            return lambda n, read: weight * loss(n, read)

        if self.full < 1:
            self._student(self.prefix).learn(parts, lessons, branches, weighted(1 - self.full), hidden, orders)
        if self.full > 0:
            self._student(()).learn(parts, _whole(lessons, orders), branches, weighted(self.full), hidden)

    def _student(self, prefix: tuple[int, ...]) -> Student:
        return Student(self.model, prefix=prefix, keep_all=self.keep_all, tuned=True)


def _whole(lessons: Sequence[Lesson], orders: Orders | None) -> list[Lesson]:
    """Opening and documents as one document, within which the block mask is the full one."""
    out = []
    for n, each in enumerate(lessons):
        order = range(len(each.documents)) if orders is None else orders[n]
        joined = each.opening + tuple(i for d in order for i in each.documents[d])
        out.append(replace(each, opening=(), documents=(joined,)))
    return out
