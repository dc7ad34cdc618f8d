"""`kvquilt methods`: every way of reusing documents, with what it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvquilt.cli.common import Json, echo_json, echo_table

if TYPE_CHECKING:
    from kvquilt.repair.presets import Method


def methods(json_output: Json = False) -> None:
    """List the methods that `ask --method` and `doctor --methods` know, with the parts that each is made of.

    Options change a part: NAME:15% is another budget, NAME:field=value a field of its selector or correction, or
    writer or order; several are joined by commas.
    """
    from kvquilt.repair.presets import METHODS

    rows = [_row(method) for method in METHODS.values()]
    if json_output:
        echo_json(rows)
        return
    shown = ("method", "writer", "order", "selector", "budget", "summary")
    echo_table(shown, [[row["name"], *(row[name] or "-" for name in shown[1:])] for row in rows])


def _row(method: Method) -> dict[str, Any]:
    """Plain types, ready for JSON; a writer of None is the engine's own."""
    from kvquilt.repair.presets import options_of

    selector, correction = method.selector, method.correction
    return {
        "name": method.name,
        "summary": method.summary,
        "writer": method.writer or None,
        "order": str(method.order),
        "selector": type(selector).__name__,
        "probe": str(selector.probe),
        "granularity": str(selector.granularity),
        "budget": None if method.budget is None else str(method.budget),
        "correction": None if correction is None else type(correction).__name__,
        "post": [type(each).__name__ for each in method.post],
        "options": {**options_of(selector), **options_of(correction)},
    }
