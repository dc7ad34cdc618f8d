"""One writer for every document, whatever stands around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvquilt.placement import Placement
from kvquilt.segment import CompiledSegment
from kvquilt.writers.notebook import Notebook
from kvquilt.writers.recipe import Chosen
from kvquilt.writers.writer import Writer


@dataclass(frozen=True, slots=True)
class Constant:
    """A name and its writer."""

    name: str
    writer: Writer

    @property
    def side(self) -> frozenset[str]:
        return self.writer.side

    def prepare(self, notes: Notebook, segments: Sequence[tuple[int, ...]]) -> Sequence[Writer]:
        return [self.writer] * len(segments)

    def writers(self, notes: Notebook, placement: Placement, documents: Sequence[int]) -> list[Chosen]:
        return [Chosen(self.writer)] * len(documents)

    def compiled(self, notes: Notebook, writer: Writer, segment: CompiledSegment) -> tuple[Writer, ...]:
        return ()
