"""Which writer each document of a prompt gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvquilt.placement import Placement
from kvquilt.segment import CompiledSegment
from kvquilt.writers.notebook import Notebook
from kvquilt.writers.writer import Writer


@dataclass(frozen=True, slots=True)
class Chosen:
    """A document's writer at asking time.

    Attributes:
        reason: why it is not what the recipe would have prepared; "" if it is.
    """

    writer: Writer
    reason: str = ""


class Recipe(Protocol):
    """Names writers; a frozen dataclass in a file of its own. What it learns is in the notebook, never in itself.

    A writer's digest says what its segments are encoded behind, so a recipe can change its mind without a segment
    ever being taken for another. Every answer is right without notes; it may only cost more.
    """

    @property
    def name(self) -> str: ...

    @property
    def side(self) -> frozenset[str]:
        """Names of the side data that all its segments have."""
        ...

    def prepare(self, notes: Notebook, segments: Sequence[tuple[int, ...]]) -> Sequence[Writer]:
        """One writer per segment of a compile call, which sees all of them. Equal segments get equal writers.

        A segment that was prepared before keeps its writer, so that nothing stored is compiled again.
        """
        ...

    def writers(self, notes: Notebook, placement: Placement, documents: Sequence[int]) -> list[Chosen]:
        """One writer per run index in `documents`, for a prompt that is about to be read."""
        ...

    def compiled(self, notes: Notebook, writer: Writer, segment: CompiledSegment) -> tuple[Writer, ...]:
        """To be called with every segment that one of its writers has just compiled, stored or not.

        Returns:
            Writers whose segments of the same ids are no longer of use; the caller may remove them.
        """
        ...
