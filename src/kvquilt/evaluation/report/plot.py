"""One figure: points with intervals over two axes, as SVG that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 460, 300, 56, 44, 14
_INSIDE = 10  # between an axis and its least value, so that points there do not cover the axis

_LEAST = 1e-4


@dataclass(frozen=True, slots=True)
class Point:
    """A value `y` with its interval at `x`.

    Attributes:
        mark: a character or two, drawn in the point.
        label: what it is, for who points at it or cannot see it.
        kind: a class that the page gives a colour.
    """

    mark: str
    label: str
    x: float
    y: float
    low: float
    high: float
    kind: str


def scatter(points: Sequence[Point], across: str, up: str, logarithmic: bool = False) -> str:
    """Both axes begin at 0; the upper of a logarithmic figure with the smallest value instead, smaller ones than 1e-4
    drawn there: what rounding does must not squeeze the rest."""
    bottom, top = 0.0, 0.0
    if logarithmic:
        least = max(_LEAST, min((p.y for p in points if p.y > 0), default=_LEAST))
        decades = math.floor(math.log10(least)), math.ceil(math.log10(max(p.high for p in points) + least))
        ticks = [(float(n), f"1e{n}") for n in range(decades[0], decades[1] + 1)]
        bottom, top = map(float, decades)
    else:
        ticks, top = _ticks(max(p.high for p in points))
    marks, right = _ticks(max(p.x for p in points))

    def x(value: float) -> float:
        return _LEFT + _INSIDE + value / right * (_WIDTH - _LEFT - _EDGE - _INSIDE)

    def y(value: float, as_written: bool = False) -> float:
        if logarithmic and not as_written:
            value = math.log10(max(value, 10.0**bottom))
        share = (value - bottom) / ((top - bottom) or 1)
        return _HEIGHT - _BOTTOM - _INSIDE - share * (_HEIGHT - _BOTTOM - _EDGE - _INSIDE)

    described = escape(f"{up} against {across}")
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{described}"><title>{described}</title>']
    for value, text in marks:
        parts.append(f'<path class="grid" d="M{x(value):.1f} {_EDGE}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{text}</text>')
    for value, text in ticks:
        at = y(value, as_written=True)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _EDGE}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    middle = (_LEFT + _WIDTH - _EDGE) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>')
    half = (_HEIGHT - _BOTTOM + _EDGE) / 2
    parts.append(f'<text transform="translate(12 {half}) rotate(-90)" text-anchor="middle">{escape(up)}</text>')
    for p in points:
        at, here = x(p.x), y(p.y)
        parts.append(
            f'<g class="{escape(p.kind)}"><title>{escape(p.label)}</title>'
            f'<path d="M{at:.1f} {y(p.low):.1f}V{y(p.high):.1f}"/><circle cx="{at:.1f}" cy="{here:.1f}" r="8"/>'
            f'<text x="{at:.1f}" y="{here + 3.5:.1f}" text-anchor="middle">{escape(p.mark)}</text></g>'
        )
    return "".join(parts) + "</svg>"


def _ticks(most: float) -> tuple[list[tuple[float, str]], float]:
    """Round values from 0 up to a last one that is not below `most`."""
    most = most if most > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(most))
    step = next(s * power for s in (0.2, 0.25, 0.5, 1.0, 2.0) if s * power * 6 >= most)
    count = math.ceil(most / step - 1e-9)
    return [(n * step, f"{n * step:.4g}") for n in range(count + 1)], count * step
