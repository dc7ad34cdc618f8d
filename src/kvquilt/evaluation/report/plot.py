"""One figure: points with intervals over two axes, as SVG that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 460, 300, 56, 44, 14
_INSIDE = 10  # between an axis and its least value, so that points there do not cover the axis


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
    """Both axes begin at 0, the upper of a logarithmic figure at a power of ten.

    That is below a tenth of the middle value: rounding alone, and whatever comes as near to nothing, must not squeeze
    the rest. What is smaller stands at the bottom, with a mark, and the figure says so.
    """
    bottom, top = 0.0, 0.0
    if logarithmic:
        bottom, top, ticks = _decades(points)
    else:
        ticks, top = _ticks(max(p.high for p in points))
    small = [p for p in points if logarithmic and p.y < 10.0**bottom]
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
        below = f'<path fill="currentColor" d="M{at - 3:.1f} {here + 9:.1f}l3 3l3 -3z"/>' if p in small else ""
        parts.append(
            f'<g class="{escape(p.kind)}"><title>{escape(p.label)}</title>'
            f'<path d="M{at:.1f} {y(p.low):.1f}V{y(p.high):.1f}"/>{below}<circle cx="{at:.1f}" cy="{here:.1f}" r="8"/>'
            f'<text x="{at:.1f}" y="{here + 3.5:.1f}" text-anchor="middle">{escape(p.mark)}</text></g>'
        )
    if small:
        marks_of = ", ".join(escape(p.mark) for p in small)
        said = f"below {10.0**bottom:g}, drawn at the bottom: {marks_of}"
        parts.append(f'<text x="{_WIDTH - _EDGE}" y="{_EDGE - 3}" text-anchor="end">{said}</text>')
    return "".join(parts) + "</svg>"


def _decades(points: Sequence[Point]) -> tuple[float, float, list[tuple[float, str]]]:
    """The first and the last logarithm of the axis, and what stands at it, also 2 and 5 where that is not much."""
    values = sorted(p.y for p in points if p.y > 0) or [1.0]
    bottom = math.floor(math.log10(max(values[0], values[len(values) // 2] / 10)))
    top = max(math.log10(max(p.high for p in points) or 1.0), bottom + 1.0)
    steps = (1, 2, 5) if top - bottom <= 3 else (1,)
    marks = [step * 10.0**n for n in range(bottom, math.floor(top) + 1) for step in steps]
    return float(bottom), top, [(math.log10(mark), f"{mark:g}") for mark in marks if math.log10(mark) <= top + 1e-9]


def _ticks(most: float) -> tuple[list[tuple[float, str]], float]:
    """Round values from 0 up to a last one that is not below `most`."""
    most = most if most > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(most))
    step = next(s * power for s in (0.2, 0.25, 0.5, 1.0, 2.0) if s * power * 6 >= most)
    count = math.ceil(most / step - 1e-9)
    return [(n * step, f"{n * step:.4g}") for n in range(count + 1)], count * step
