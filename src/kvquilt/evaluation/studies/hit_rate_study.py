"""Hit rates over exponents, collections, prompts and capacities: every cell is a trace, every arm a cache on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvquilt.errors import InputError
from kvquilt.evaluation.studies.hit_rate import ARMS, simulate
from kvquilt.evaluation.studies.hit_rate_model import ModelSize
from kvquilt.evaluation.studies.hit_rate_trace import Traffic, draw

SWEPT = ("exponent", "documents", "per_request", "order", "capacity_bytes")


@dataclass(frozen=True, slots=True)
class HitRateStudy:
    """Every combination of what is swept.

    Attributes:
        traffic: what is not swept.
        size: whose cache is held. `bytes_per_token`: of it; None for two bytes a number.
        capacities: bytes.

    Raises:
        InputError: nothing to sweep over, or a number out of its range.
    """

    traffic: Traffic
    size: ModelSize
    exponents: tuple[float, ...] = (0.6, 0.8, 1.0, 1.2)
    documents: tuple[int, ...] = (1000, 5000)
    per_request: tuple[int, ...] = (5,)
    orders: tuple[str, ...] = ("shuffled",)
    capacities: tuple[int, ...] = (30_000_000_000,)
    arms: tuple[str, ...] = ARMS
    bytes_per_token: int | None = None

    def __post_init__(self) -> None:
        for name in ("exponents", "documents", "per_request", "orders", "capacities", "arms"):
            if not getattr(self, name):
                raise InputError(name, "name at least one")
        if self.held < 1 or min(self.capacities) < self.held:
            raise InputError("capacities", f"must hold a token, which takes {self.held} bytes", min(self.capacities))

    @property
    def held(self) -> int:
        """Bytes of a token."""
        return self.size.bytes_per_token if self.bytes_per_token is None else self.bytes_per_token

    def cells(self) -> list[tuple[Traffic, int]]:
        """Traffic and bytes of every cell; the exponent changes fastest."""
        swept = itertools.product(self.orders, self.per_request, self.documents, self.exponents)
        made = [
            replace(self.traffic, order=order, per_request=k, documents=count, exponent=exponent)
            for order, k, count, exponent in swept
        ]
        return [(traffic, capacity) for capacity in self.capacities for traffic in made]

    def run(self, progress: Callable[[int, int], object] | None = None) -> dict[str, Any]:
        """Figures, ready for JSON.

        Raises:
            InputError: an unknown arm; a cache that no document fits into.
        """
        cells, rows = self.cells(), []
        for n, (traffic, capacity) in enumerate(cells):
            trace = draw(traffic)
            tokens = capacity // self.held
            arms = [simulate(trace, arm, tokens, self.size, self.held).as_dict(self.held) for arm in self.arms]
            rows.append(
                {
                    **{name: getattr(traffic, name) for name in SWEPT[:-1]},
                    "capacity_bytes": capacity,
                    "capacity_tokens": tokens,
                    "documents_tokens": int(trace.lengths.sum()),
                    "arms": arms,
                }
            )
            if progress is not None:
                progress(n + 1, len(cells))
        beside = {name: value for name, value in asdict(self.traffic).items() if name not in SWEPT}
        return {"of": asdict(self.size), "bytes_per_token": self.held, "traffic": beside, "rows": rows}


def table(rows: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and lines of token hit rates: a line for every cell, a column for every arm."""
    several = [name for name in SWEPT if len({row[name] for row in rows}) > 1] or ["exponent"]
    lines = [
        (*(f"{row[name]}" for name in several), *(f"{100 * arm['token_hit_rate']:.1f}%" for arm in row["arms"]))
        for row in rows
    ]
    return (*several, *(arm["arm"] for arm in rows[0]["arms"])), lines
