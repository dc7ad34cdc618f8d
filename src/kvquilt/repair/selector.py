"""What every selector promises."""

from __future__ import annotations

from typing import Literal, Protocol

from kvquilt.placement import Placement


class Selector(Protocol):
    """Chooses which document rows are computed again; inline rows always are.

    A selector is a frozen dataclass in a file of its own whose fields are its settings.

    Attributes:
        probe: what it has to run or know before it can choose.
        granularity: the smallest thing it chooses.
    """

    @property
    def probe(self) -> Literal["none", "retriever"]: ...

    @property
    def granularity(self) -> Literal["document"]: ...

    def select(self, placement: Placement) -> list[range]:
        """Ascending, disjoint slot ranges of document rows to recompute in every layer."""
        ...
