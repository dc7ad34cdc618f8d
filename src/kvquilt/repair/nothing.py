from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvquilt.placement import Placement


@dataclass(frozen=True, slots=True)
class Nothing:
    """No document row: pure reuse."""

    probe: Literal["none"] = "none"
    granularity: Literal["document"] = "document"

    def select(self, placement: Placement) -> list[range]:
        return []
