"""Splits of what a file holds: by group, in the file's order, never by question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.checks import check_count, check_name, check_share

SPLITS = ("tuning", "evaluation")
SIZES = {"train": 256, "tuning": 128, "evaluation": 256}  # of a generated task, where nobody says

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Divided(Generic[T]):
    """Groups of a task's samples, or samples that are groups of their own."""

    tuning: tuple[T, ...]
    evaluation: tuple[T, ...]

    @classmethod
    def of(cls, groups: Sequence[T], share: float, tuning: Sequence[T] | None = None) -> Divided[T]:
        """`groups` evaluate and those of another file tune; without one, the first `share` of `groups` tune.

        Raises:
            InputError: a share outside 0 to 1.
        """
        check_share("share", share)
        tuned = round(share * len(groups))
        if tuning is not None:
            return cls(tuple(tuning), tuple(groups))
        return cls(tuple(groups[:tuned]), tuple(groups[tuned:]))

    def split(self, split: str) -> tuple[T, ...]:
        """Raises `InputError`: an unknown split, or an empty one."""
        check_name("split", split, SPLITS)
        found = self.tuning if split == "tuning" else self.evaluation
        if not found:
            raise InputError("split", "has nothing in it; name another file (tuning=PATH) or another share", split)
        return found


def in_turns(groups: Iterable[Sequence[T]]) -> list[T]:
    """The first of every group, the second of every group, and so on: few items then rest on many groups."""
    nothing = object()
    return [each for row in zip_longest(*groups, fillvalue=nothing) for each in row if each is not nothing]  # type: ignore[misc]


def check_asked(count: int | None) -> None:
    """Raises `InputError`: a number of items below 1."""
    if count is not None:
        check_count("count", count, 1)
