from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvquilt.placement import Placement


@dataclass(frozen=True, slots=True)
class Everything:
    """All document rows: full prefill, the truth that everything else is measured against."""

    probe: Literal["none"] = "none"
    granularity: Literal["document"] = "document"

    def select(self, placement: Placement) -> list[range]:
        return [placement.span(i) for i in placement.documents()]
