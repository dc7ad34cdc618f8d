"""How a writer is trained: everything that a run's outcome depends on beside model and data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvquilt.errors import InputError
from kvquilt.training.components import Shape
from kvquilt.training.objective import Objective

KINDS = {
    "kv-packet": Shape(rank=0, header=8, trailer=8),
    "sempic": Shape(),
    "joint": Shape(header=8, trailer=8),
}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Defaults are kvquilt's own recipe; `published` is that of the papers.

    Attributes:
        kind: ``kv-packet``, ``sempic`` or ``joint``: a name for the artefact; `shape` says what is trained.
        epochs: passes over the data; `steps` ends earlier.
        batch: exercises per optimizer step; `micro_batch` of them at a time.
        lr, lr_soft: AdamW's rate for the adapter and for soft tokens, falling linearly to 0 over all steps.
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
    shape: Shape = field(default_factory=Shape)
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
        for name in ("epochs", "batch", "micro_batch", "new_tokens"):
            if getattr(self, name) < 1:
                raise InputError(name, "at least 1", getattr(self, name))
        if self.steps is not None and self.steps < 1:
            raise InputError("steps", "at least 1", self.steps)
        if self.top < 0 or self.validate_every < 0:
            raise InputError("top", "counts are at least 0", f"{self.top}, {self.validate_every}")
        if not (self.lr > 0 and self.lr_soft > 0):
            raise InputError("lr", "above 0", f"{self.lr}, {self.lr_soft}")
        if self.normalise not in ("token_mean", "sum"):
            raise InputError("normalise", "token_mean or sum", self.normalise)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Names of the fields in which a stored configuration differs."""
        mine = self.as_dict()
        return [f.name for f in fields(self) if _plain(mine[f.name]) != _plain(other.get(f.name))]


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
