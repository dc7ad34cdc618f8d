"""Damage: what an arm makes of the questions that full prefill answers because of the documents.

The base D are the questions that are right under full prefill and wrong without any document, fixed once per model and
task. Choosing them so favours full prefill, whose damage is 0 by construction: `gains` counts what an arm answers
outside D, and the damage of full prefill computed in another layout is the floor under every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvquilt.errors import InputError
from kvquilt.evaluation.figures.statistics import Bootstrap, Interval, share_of

LEAST_BASE = 30  # fewer questions in D carry no claim


@dataclass(frozen=True, slots=True)
class Damage:
    """One arm.

    Attributes:
        base: |D|.
        damage: share of D that the arm answers wrongly; None where D is empty.
        recovery: of what pure reuse answers wrongly in D, the share that is right here; None where there is nothing.
        collateral: of what pure reuse answers rightly in D, the share that is wrong here; None likewise.
        gains: questions outside D that full prefill answers wrongly and the arm rightly.
        accuracy: share of all questions that the arm answers rightly.
    """

    base: int
    damage: float | None
    recovery: float | None
    collateral: float | None
    gains: int
    accuracy: float

    @property
    def claims(self) -> bool:
        """Whether D is large enough for the shares to say anything."""
        return self.base >= LEAST_BASE


@dataclass(frozen=True, slots=True)
class DamageIntervals:
    """The shares of a `Damage` with where 95 % of them lie when groups are drawn anew.

    Each is None where the share is, or where one draw in twenty holds no question that it is a share of.
    """

    damage: Interval | None
    recovery: Interval | None
    collateral: Interval | None


def damage_base(full: Sequence[bool], without: Sequence[bool]) -> list[bool]:
    """Which questions are in D: right under full prefill, wrong without documents.

    Raises:
        InputError: of different length.
    """
    _check(full, without=without)
    return [f and not z for f, z in zip(full, without, strict=True)]


def damage_of(arm: Sequence[bool], full: Sequence[bool], without: Sequence[bool], none: Sequence[bool]) -> Damage:
    """Damage of an arm from what each answers rightly, question by question in one order.

    Args:
        without: under the same prompt with no documents; `none` under pure reuse.

    Raises:
        InputError: no questions, or of different length.
    """
    if not arm:
        raise InputError("arm", "at least one question is needed")
    _check(arm, full=full, without=without, none=none)
    base = damage_base(full, without)
    inside = [(bool(a), bool(n)) for a, n, d in zip(arm, none, base, strict=True) if d]
    return Damage(
        base=len(inside),
        damage=_share([not a for a, _ in inside]),
        recovery=_share([a for a, n in inside if not n]),
        collateral=_share([not a for a, n in inside if n]),
        gains=sum(a and not f for a, f in zip(arm, full, strict=True)),
        accuracy=sum(map(bool, arm)) / len(arm),
    )


def damage_intervals(
    draws: Bootstrap, arm: Sequence[bool], full: Sequence[bool], without: Sequence[bool], none: Sequence[bool]
) -> DamageIntervals:
    """What `damage_of` says of the same questions, over the draws of their groups.

    Raises:
        InputError: of different length, or another number of questions than the draws have.
    """
    _check(arm, full=full, without=without, none=none, groups=draws.groups)
    base = damage_base(full, without)
    right, wrong = list(map(bool, arm)), [not a for a in arm]
    lost = [d and not n for d, n in zip(base, none, strict=True)]
    kept = [d and bool(n) for d, n in zip(base, none, strict=True)]
    return DamageIntervals(
        damage=_interval(draws, wrong, base),
        recovery=_interval(draws, right, lost),
        collateral=_interval(draws, wrong, kept),
    )


def _interval(draws: Bootstrap, hits: Sequence[bool], among: Sequence[bool]) -> Interval | None:
    try:
        return draws.level(share_of([h and m for h, m in zip(hits, among, strict=True)], among))
    except InputError:  # too few draws hold one
        return None


def _share(hits: Sequence[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


def _check(first: Sequence[bool], **others: Sequence[object]) -> None:
    for name, each in others.items():
        if len(each) != len(first):
            raise InputError(name, f"must be of as many questions as the others, {len(first)}", len(each))
