"""What tuning found: figures of every candidate, the choice, and how it held on other prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

_ALLOWANCE = 0.01  # few prompts have a large standard error, which must not open the door


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate over some prompts.

    Attributes:
        quality: what is held against the target: `score` where answers are known, else `fidelity`.
        fidelity: ``exp(-mean KL)`` per answer token, 1 where the distributions are full prefill's.
        score: token F1 against the known answers over full prefill's own F1; None where none are known.
        error: standard error of `quality` over prompts.
        charged: mean share of what reuse saves, in token-layers.
        first_token: median of full prefill's time to the first token over the candidate's.
    """

    method: str
    quality: float
    fidelity: float
    score: float | None
    error: float
    mean_kl: float
    top1: float
    charged: float
    first_token: float
    prompts: int

    @property
    def summary(self) -> str:
        """The figures in one line."""
        score = "" if self.score is None else f"score {self.score:.3f} of full prefill's, "
        return f"{score}fidelity {self.fidelity:.3f}, top-1 {self.top1:.2f} on {self.prompts} prompts"


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What `tune` measured; stored under the fingerprint and obeyed by ``auto``.

    Attributes:
        trials: on the prompts that the choice was made on.
        chosen: the cheapest of them that reaches the target; None where none does.
        held_out: the choice on the other prompts; None where it cannot run on all of them. Only where it, too,
            reaches the target (within its standard error, of which 0.01 counts at most) is the choice `accepted`.
        judged_by: ``score`` or ``fidelity``.
    """

    model: str
    fingerprint: str
    writer: str
    target: float
    judged_by: str
    trials: tuple[Trial, ...]
    chosen: str | None
    held_out: Trial | None
    seconds: float
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What was measured of the choice, in one line."""
        if self.chosen is None:
            return "nothing reached the target"
        return self.refused[self.chosen] if self.held_out is None else self.held_out.summary

    @property
    def accepted(self) -> bool:
        """Whether ``auto`` may use the choice."""
        held = self.held_out
        return held is not None and held.quality >= self.target - min(held.error, _ALLOWANCE)

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TuneReport:
        """The report of `as_dict`. Raises TypeError or KeyError for one of another version."""
        held = data["held_out"]
        made = {
            "trials": tuple(Trial(**t) for t in data["trials"]),
            "held_out": None if held is None else Trial(**held),
        }
        return cls(**{**data, **made})
