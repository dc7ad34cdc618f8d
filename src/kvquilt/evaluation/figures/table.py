"""A table of text, and how numbers stand in it."""

from __future__ import annotations

from dataclasses import dataclass

from kvquilt.evaluation.figures.statistics import Interval
from kvquilt.evaluation.run.arms import AGAIN

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, each as long as `head`; the first names the arm.

    Attributes:
        notes: what must be known to read it, a sentence each.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def named(method: str) -> str:
    """An arm as tables call it."""
    return f"{method} (noise floor)" if method == AGAIN else method


def interval(found: Interval, signed: bool = False) -> str:
    """Value and interval: ``0.412 [0.35, 0.47]``."""
    sign = "+" if signed else ""
    return f"{found.value:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def nats(value: float) -> str:
    """Three digits, and below that the order: the noise floor is to be seen."""
    return f"{value:.3f}" if abs(value) >= 0.0005 or not value else f"{value:.0e}"


def nats_around(found: Interval) -> str:
    """`interval` of a distance."""
    return f"{nats(found.value)} [{nats(found.low)}, {nats(found.high)}]"
