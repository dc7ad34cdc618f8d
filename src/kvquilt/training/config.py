"""How a writer is trained: everything that a run's outcome depends on beside model and data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvquilt.errors import InputError, nearest
from kvquilt.training.block_tuned import TunedShape
from kvquilt.training.encoder import EncoderShape
from kvquilt.training.link_tokens import LinkShape
from kvquilt.training.objective import Objective
from kvquilt.training.shape import Shape
from kvquilt.training.trainable import Trainable
from kvquilt.writers.trained import TRAINED

KINDS: dict[str, Trainable] = {
    "kv-packet": Shape(rank=0, header=8, trailer=8),
    "sempic": Shape(),
    "joint": Shape(header=8, trailer=8),
    "link-tokens": LinkShape(),
    "encoder": EncoderShape(),
    "block-tuned": TunedShape(),
}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One configuration; `own` is kvquilt's recipe for a kind of writer, `published` that of the papers.

    Attributes:
        kind: of `KINDS`, whose shape `shape` is like.
        fixed: of the shape's kinds of parts: those that are on, but not trained.
        epochs: passes over the data; `steps` ends earlier.
        batch: exercises per optimizer step, of all processes together; each runs `micro_batch` of its own at a time.
        lr, lr_soft: AdamW's rate for matrices and for soft tokens and gates, falling linearly to 0 over all steps.
        new_tokens: of a teacher's answer at most.
        top: most likely tokens kept per answer token of the teacher, 0 for all.
        keep_targets: store what the teacher says; without, it is asked at every step.
        normalise: ``token_mean`` over the answer tokens of a step, or ``sum`` over them (the papers).
        shared_prefix: documents are encoded behind the opening of the engine's prompts, else alone.
        shuffle: the student sees a lesson's documents in another order than the teacher.
        checkpointing: KV gradient checkpointing in the writer's pass: less memory, more time.
        validate_every: steps between two validations; 0 validates at the end only.
    """

    kind: str = "sempic"
    shape: Trainable = field(default_factory=Shape)
    fixed: tuple[str, ...] = ()
    objective: Objective = field(default_factory=Objective)
    epochs: int = 1
    steps: int | None = None
    batch: int = 1
    micro_batch: int = 1
    lr: float = 5e-4
    lr_soft: float = 5e-3
    new_tokens: int = 32
    top: int = 64
    keep_targets: bool = True
    normalise: str = "token_mean"
    shared_prefix: bool = False
    shuffle: bool = False
    checkpointing: bool = False
    validate_every: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("kind", f"unknown{nearest(self.kind, KINDS)}", self.kind)
        if type(self.shape) is not type(KINDS[self.kind]):
            rule = f"that of a {self.kind} writer is a {type(KINDS[self.kind]).__name__}"
            raise InputError("shape", rule, type(self.shape).__name__)
        there = self.shape.kinds
        # one shape serves kv-packet, sempic and joint: parts of another under a kind's name would be a surprise
        if isinstance(self.shape, Shape) and (more := set(there) - set(KINDS[self.kind].kinds)):
            raise InputError("shape", f"{self.kind} has no {' and no '.join(sorted(more))}; joint has all", self.kind)
        for name in self.fixed:
            if name not in there:
                raise InputError("fixed", f"must be among what the writer has: {', '.join(there)}", name)
        if set(self.fixed) == set(there):
            raise InputError("fixed", "something must be left to train", ", ".join(self.fixed))
        for name in ("epochs", "batch", "micro_batch", "new_tokens"):
            if getattr(self, name) < 1:
                raise InputError(name, "at least 1", getattr(self, name))
        if self.steps is not None and self.steps < 1:
            raise InputError("steps", "at least 1", self.steps)
        for name in ("top", "validate_every"):
            if getattr(self, name) < 0:
                raise InputError(name, "at least 0", getattr(self, name))
        for name in ("lr", "lr_soft"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(name, "a finite number above 0", getattr(self, name))
        if self.normalise not in ("token_mean", "sum"):
            raise InputError("normalise", "token_mean or sum", self.normalise)

    @property
    def trained(self) -> tuple[str, ...]:
        """Of the shape's kinds of parts: those that are trained."""
        return tuple(name for name in self.shape.kinds if name not in self.fixed)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Names of the fields in which a configuration that was stored as JSON differs, such as ``shape.rank``."""
        mine, theirs = _flat(self.as_dict()), _flat(other)
        return [name for name in mine | theirs if name not in mine or name not in theirs or mine[name] != theirs[name]]


def own(kind: str) -> TrainConfig:
    """kvquilt's recipe for a kind of writer.

    Raises:
        InputError: no such kind.
    """
    if kind not in KINDS:
        raise InputError("writer", f"unknown{nearest(kind, KINDS)}", kind)
    # dense: with it a small reader came seven times nearer and more on the same samples, see writer-study-small.json
    made = TrainConfig(kind, KINDS[kind], objective=Objective(dense=10.0))
    if kind == "encoder":  # matrices of full size, in part copies of the model's
        return replace(made, lr=1e-4)
    # a tuned reader is served by the engine's own writer, which encodes behind the opening
    return replace(made, shared_prefix=True) if kind == "block-tuned" else made


def published(kind: str) -> TrainConfig:
    """The papers' recipe: KL summed over the whole vocabulary, the teacher asked anew at every step, one rate for all.

    KV Packet (arXiv 2604.13226): 30 epochs of 64 samples a step. SemPIC and Joint (arXiv 2607.28069): 5 epochs of 16.
    A sample of theirs has one question.

    Raises:
        InputError: no such kind, or one whose paper trains otherwise.
    """
    base = own(kind)
    if kind not in TRAINED:
        raise InputError(
            "published", f"is the recipe of {', '.join(TRAINED)}; the papers of others train otherwise", kind
        )
    epochs, batch = (30, 64) if kind == "kv-packet" else (5, 16)
    return replace(
        base, objective=Objective(), epochs=epochs, batch=batch, lr=5e-4, lr_soft=5e-4, top=0, keep_targets=False,
        normalise="sum", shared_prefix=False, shuffle=False,
    )  # fmt: skip


def _flat(fields: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """By full name, values as they come back from JSON."""
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{within}{name}.")
        else:
            out[within + name] = list(value) if isinstance(value, tuple) else value
    return out
