"""What a training run says about itself while it goes on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """One optimizer step.

    Attributes:
        loss: of the objective, per answer token; `kl` of it in nats. 0 where nothing was answered.
        tokens: of answers; `questions` that were learned from, `empty` ones to which the teacher says nothing.
        seconds: since the run began, earlier sittings included; `remaining` is an estimate.
        stages: seconds of this step by stage: teacher, student (forward and backward).
        validation: KL per answer token on held-out exercises, where it was measured at this step.
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
    empty: int = 0

    def validated(self, validation: float) -> Progress:
        return replace(self, validation=validation)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Start:
    """KL per answer token on held-out exercises before the first step.

    Attributes:
        validation: of the writer as it starts; `none` of pure reuse, which a fresh adapter equals.
        full: of full prefill against the teacher: what rounding alone makes of it.
    """

    validation: float
    none: float
    full: float

    def as_dict(self) -> dict[str, Any]:
        return {"step": 0, **asdict(self)}
