"""Figures without a window system, for what is drawn; matplotlib is the extra ``plot``."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from kvquilt.errors import InputError


def new_figure(width: float, height: float, field: str) -> Any:
    """An empty figure of so many inches.

    Args:
        field: what asked for a picture.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(field, "a picture needs matplotlib: pip install 'kvquilt[plot]'") from None
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # pyplot would look for a window system
    return figure


def png_of(figure: Any) -> bytes:
    out = BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
