"""Damage: what an arm makes of the questions that full prefill answers because of the documents.

The base D are the questions that are right under full prefill and wrong without any document, fixed once per model and
task. Choosing them so favours full prefill, whose damage is 0 by construction: `gains` counts what an arm answers
outside D, and the damage of full prefill computed in another layout is the floor under every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvquilt.errors import InputError

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


def _share(hits: Sequence[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


def _check(first: Sequence[bool], **others: Sequence[bool]) -> None:
    for name, each in others.items():
        if len(each) != len(first):
            raise InputError(name, f"must be of as many questions as the others, {len(first)}", len(each))
