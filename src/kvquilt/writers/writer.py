"""What every writer promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.segment import CompiledSegment


class Writer(Protocol):
    """Compiles segments. Same writer, model and ids give the same segment up to rounding, whatever the batch.

    A frozen dataclass, so that equal writers are one.
    """

    @property
    def digest(self) -> str:
        """Content identity, part of every segment key: another prefix or other weights are another writer."""
        ...

    @property
    def encoded_behind(self) -> tuple[int, ...] | None:
        """Ids that every segment is encoded behind: a document right behind just these is exact. ``None``: never."""
        ...

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of the soft tokens before and behind every segment; its compiled rows are header, segment, trailer."""
        ...

    @property
    def side(self) -> frozenset[str]:
        """Names of the side data that every segment has: what a reader's layout may ask for."""
        ...

    def compile(
        self, model: LanguageModel, segments: Sequence[tuple[int, ...]], counter: RowCounter | None = None
    ) -> Iterator[tuple[int, CompiledSegment]]:
        """Yield ``(index into segments, compiled segment)`` as soon as each is finished, in any order.

        The ids of a compiled segment are those of its rows, soft tokens of `around` included.
        """
        ...
