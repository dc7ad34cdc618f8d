"""What a run says of each arm: fidelity first, then task scores, then damage."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvquilt.evaluation.answer_fidelity import Divergence
from kvquilt.evaluation.damage import Damage, DamageIntervals
from kvquilt.evaluation.statistics import Interval, Outcome


@dataclass(frozen=True, slots=True)
class Fidelity:
    """An arm's distributions against full prefill's.

    Attributes:
        first, own, gold: over the rows of each kind, see `kvquilt.evaluation.answer_fidelity`.
        kl: mean KL(full || arm) over own rows.
        kl_recovery: over own rows, where the run has ``none`` and there is something to recover.
        p: of the signed-rank test against ``none`` on the means of groups, adjusted for all methods; None for ``none``
            and for controls.
        nll_gap: nats per gold token.
    """

    first: Divergence
    own: Divergence
    gold: Divergence
    kl: Interval
    kl_recovery: float | None
    p: float | None
    nll_gap: float


@dataclass(frozen=True, slots=True)
class Fewer:
    """A method against full prefill over fewer documents.

    Attributes:
        arm: of those in the run, the one whose time to the first token is nearest to the method's.
        difference: of scores, the method's less that arm's; `outcome` is what it says.
    """

    arm: str
    difference: Interval
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Scored:
    """Task scores of an arm that answers.

    Attributes:
        score: mean of the task's own grader; `difference` to full prefill on the same items, and what it says.
        right: share of right answers.
        micro_f1: of the corpus; `f1_recovery` of it, where the run has ``none`` and there is something to recover.
        only_full, only_arm: items that one of both gets right; `p` of McNemar's test, adjusted for all methods; None
            for full prefill and for controls.
        damage: where the run has ``none``, which answers; `shares` are its shares with intervals.
        fewer: what a user could do instead, where the run has such an arm; None for controls.
    """

    score: Interval
    difference: Interval
    outcome: Outcome
    right: float
    micro_f1: Interval
    f1_recovery: float | None
    only_full: int
    only_arm: int
    p: float | None
    damage: Damage | None
    shares: DamageIntervals | None
    fewer: Fewer | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What an arm computes.

    Attributes:
        reused: mean share of prompt tokens that were not computed.
        charged: mean share of what reuse saves, that was spent again.
        flops: mean share of the operations of full prefill on the same item, all its documents in the prompt.
        first_token: median of the seconds over those of full prefill on the same item. From readings that nothing
            warmed up: for a claim see `kvquilt.evaluation.timing`.
        fallbacks: how often each reason occurs.
    """

    reused: float
    charged: float
    flops: float
    first_token: float
    fallbacks: dict[str, int]


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm, over the `items` that it could run on; on `refused` others it could not.

    Attributes:
        fidelity: None for full prefill, or where it could run on none.
        scored: None for an arm that gives no answers, or where it could run on none.
    """

    method: str
    items: int
    refused: int
    fidelity: Fidelity | None = None
    scored: Scored | None = None
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """A run.

    Attributes:
        documents_help: full prefill's score less that of no context: where the interval is not above 0, the task says
            nothing about reuse on this model. None where no context gives no answers.
        arms: in the run's order.
        refused: arms of which nothing is reported, and why.
    """

    items: int
    groups: int
    documents_help: Interval | None
    arms: tuple[ArmSummary, ...]
    refused: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return asdict(self)
