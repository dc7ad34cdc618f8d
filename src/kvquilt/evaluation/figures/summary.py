"""What a run says of each arm: fidelity first, then task scores, then damage."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvquilt.evaluation.figures.answer_fidelity import Divergence
from kvquilt.evaluation.figures.damage import Damage, DamageIntervals
from kvquilt.evaluation.figures.statistics import Interval, Outcome


@dataclass(frozen=True, slots=True)
class Against:
    """An arm held against another one, on the same items.

    Attributes:
        arm: the other one.
        difference: this one's less the other's, in pairs; `outcome` is what it says, a win being better.
    """

    arm: str
    difference: Interval
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Fidelity:
    """An arm's distributions against full prefill's.

    Attributes:
        first, own, gold: over the rows of each kind, see `kvquilt.evaluation.figures.answer_fidelity`.
        kl: mean KL(full || arm) over own rows.
        kl_recovery: over own rows, where the run has ``none`` and there is something to recover.
        p: of the signed-rank test against ``none`` on the means of groups, adjusted for all methods; None for ``none``
            and for controls.
        nll_gap: nats per gold token.
        random, deranged: by mean KL, as in `Scored`.
    """

    first: Divergence
    own: Divergence
    gold: Divergence
    kl: Interval
    kl_recovery: float | None
    p: float | None
    nll_gap: float
    random: Against | None = None
    deranged: Against | None = None


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
        unmarked: how many answers lack the marker behind which the task looks for one, and so score as empty; None
            where it looks at all of them.
        fewer: against full prefill over fewer documents, what a user could do instead: of those in the run, the one
            whose time to the first token is nearest. None for controls, as the next two.
        random: of a selector, against random rows: the `Draws` of its writer that are charged most nearly as much.
        deranged: against the same method over the documents of other items.
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
    unmarked: int | None = None
    fewer: Against | None = None
    random: Against | None = None
    deranged: Against | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """Time to the first token by `kvquilt.evaluation.run.timing`: warmed up, in turns, nothing but the prompt's way.

    Attributes:
        ratio: median of an arm's time over that of full prefill in the same round; `low`, `high`: its quartiles.
        processor: the same of the time of all threads, which other processes hardly change.
        seconds: median, by the clock.
        repeats: readings of each arm, `prompts` of them together.
        break_even: requests over a prompt's documents after which compiling them has paid; None where the arm is no
            faster than full prefill, or no method.
    """

    ratio: float
    low: float
    high: float
    processor: float
    seconds: float
    repeats: int
    prompts: int
    break_even: float | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What an arm computes.

    Attributes:
        reused: mean share of prompt tokens that were not computed.
        charged: mean share of what reuse saves, that was spent again.
        flops: mean share of the operations of full prefill on the same item, all its documents in the prompt.
        first_token: median of the seconds over those of full prefill on the same item, from single readings that
            nothing warmed up.
        fallbacks: how often each reason occurs.
        timed: what to claim instead, where it was measured.
    """

    reused: float
    charged: float
    flops: float
    first_token: float
    fallbacks: dict[str, int]
    timed: Timed | None = None


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm, over the `items` that it could run on; on `refused` others it could not.

    Attributes:
        fidelity: None for full prefill, or where it could run on none.
        scored: None for an arm that gives no answers, or where it could run on none.
        work: None where it could run on none, and for an arm that has no cost (`Arm.has_a_cost`).
    """

    method: str
    items: int
    refused: int
    fidelity: Fidelity | None = None
    scored: Scored | None = None
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class Draws:
    """Random rows with several seeds as one control: what chooses rows must beat them.

    Attributes:
        name: as the arms are written, but for the seed.
        arms: one for every seed; `items` that all of them could run on.
        charged: mean share, as in `Work`.
        kl: of the mean over draws; `kl_range`: the least and the greatest of a draw. `score` and `score_range`
            likewise, None where they give no answers.
    """

    name: str
    arms: tuple[str, ...]
    items: int
    charged: float
    kl: Interval
    kl_range: tuple[float, float]
    score: Interval | None = None
    score_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class PartScore:
    """An arm on a part of the run.

    Attributes:
        items: that it could run on.
        score: their mean; `around`: its interval, None where no groups can be drawn: the part is one.
        base: of them, those in the D of `kvquilt.evaluation.figures.damage`; `lost`: those the arm answers wrongly.
            None where no context gives no answers.
    """

    items: int
    score: float
    around: Interval | None
    base: int | None
    lost: int | None


@dataclass(frozen=True, slots=True)
class Part:
    """A group, or all items of a kind, of the run; `arms` that give answers, by name."""

    name: str
    items: int
    arms: dict[str, PartScore]


@dataclass(frozen=True, slots=True)
class Summary:
    """A run.

    Attributes:
        documents_help: full prefill's score less that of no context: where the interval is not above 0, the task says
            nothing about reuse on this model. None where no context gives no answers.
        arms: in the run's order.
        refused: arms of which nothing is reported, and why.
        prefix_hit: the floor under every time to the first token: all before the question is there.
        random: see `Draws`.
        by_kind: where the items are of several kinds.
        by_group: where the groups are too few for an interval to say much.
    """

    items: int
    groups: int
    documents_help: Interval | None
    arms: tuple[ArmSummary, ...]
    refused: dict[str, str] = field(default_factory=dict)
    prefix_hit: Timed | None = None
    random: tuple[Draws, ...] = ()
    by_kind: tuple[Part, ...] = ()
    by_group: tuple[Part, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether times to the first token were measured, and are no single readings."""
        return self.prefix_hit is not None

    def first_token(self, arm: ArmSummary) -> float | None:
        """Of one arm, in full prefill's own time, of the one sort that this summary tells; None where it has none."""
        if arm.work is None:
            return None
        if self.measured:
            return None if arm.work.timed is None else arm.work.timed.ratio
        return arm.work.first_token

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return asdict(self)
