"""Scenes for selectors that only look at where documents stand."""

from __future__ import annotations

from collections.abc import Sequence

from kvquilt.placement import place_runs
from kvquilt.repair.scene import Scene
from tests.models import tiny
from tests.oracle import runs_of


def scene_of(shape: str, lengths: Sequence[int], exact: Sequence[int] = ()) -> Scene:
    """The runs of `tests.oracle.runs_of`; all documents may be spent on but the runs `exact`."""
    placement = place_runs(runs_of(shape, lengths))
    inline = [placement.span(i) for i, run in enumerate(placement.runs) if run.document is None]
    return Scene(tiny(), placement, [i for i in placement.documents() if i not in exact], inline)


def spans_of(scene: Scene, slots: Sequence[int]) -> list[list[int]]:
    """Those of `slots` in each spendable document, ascending, counted from its first token."""
    return [sorted(slot - span.start for slot in slots if slot in span) for span in scene.spans]
