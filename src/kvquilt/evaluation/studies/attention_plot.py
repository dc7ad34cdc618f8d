"""Pictures of a study of attention: heat maps by layer, and curves along a document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvquilt.evaluation.run.arms import FULL
from kvquilt.evaluation.studies.attention_measures import BINS, FIRST
from kvquilt.evaluation.studies.attention_summary import ArmAttention, AttentionSummary
from kvquilt.picture import new_figure, png_of

_COLUMNS = 4


def pictures(summary: AttentionSummary) -> dict[str, bytes]:
    """PNG by file name: heat maps of the raw distance by layer and head, and by layer and place in a document; of the
    NRMSE by layer and head; curves of the distance by place, and of the density at a document's start.

    Raises:
        InputError: matplotlib, the extra ``plot``, is not installed.
    """
    others = [arm for arm in summary.arms if arm.method != FULL]
    maps = {
        "distance-heads.png": (lambda arm: arm.heads["distance"], "head", "difference of a token's weight, interior"),
        "distance-places.png": (lambda arm: arm.places, "place in the document, %", "difference of a token's weight"),
        "retrieval-heads.png": (lambda arm: arm.heads["nrmse"], "head", "NRMSE of what is retrieved"),
    }
    drawn = {name: _heat_maps(others, *each) for name, each in maps.items()} if others else {}
    return drawn | {"curves.png": _curves(summary.arms)}


def _heat_maps(arms: Sequence[ArmAttention], of: Callable[[ArmAttention], Any], across: str, title: str) -> bytes:
    """One for each arm, all on one scale."""
    columns = min(_COLUMNS, len(arms))
    lines = -(-len(arms) // columns)
    figure = new_figure(3.2 * columns + 1.2, 2.8 * lines + 0.6, "out")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    tables = [np.asarray(of(arm)) for arm in arms]
    finite = np.concatenate([table[np.isfinite(table)] for table in tables])
    top = float(finite.max()) if finite.size else 1.0
    by_place = tables[0].shape[1] == BINS and across != "head"
    for axis, arm, values in zip(axes, arms, tables, strict=False):
        extent = (0.0, 100.0, len(values) - 0.5, -0.5) if by_place else None
        image = axis.imshow(values, aspect="auto", vmin=0.0, vmax=top or 1.0, cmap="viridis", extent=extent)
        axis.set_title(arm.method, fontsize=9)
        axis.set_xlabel(across, fontsize=8)
    for axis in axes[len(arms) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("layer", fontsize=8)
    figure.colorbar(image, ax=list(axes))
    figure.suptitle(f"{title}, against full prefill")
    return png_of(figure)


def _curves(arms: Sequence[ArmAttention]) -> bytes:
    figure = new_figure(11, 5, "out")
    left, right = figure.subplots(1, 2)
    at = [100 * (n + 0.5) / BINS for n in range(BINS)]
    for n, arm in enumerate(arms):
        if arm.method != FULL:
            means = [float(column[np.isfinite(column)].mean()) if np.isfinite(column).any() else np.nan
                     for column in np.asarray(arm.places).T]  # fmt: skip
            left.plot(at, means, "o-", markersize=3, color=f"C{n % 10}", label=arm.method)
        right.plot(range(1, FIRST + 1), arm.density, "o-", markersize=3, color=f"C{n % 10}", label=arm.method)
    left.set_xlabel("place in the document, %")
    left.set_ylabel("difference of a token's weight to full prefill's")
    left.set_yscale("symlog", linthresh=1e-6)
    right.set_xlabel("token of the document")
    right.set_ylabel("weight over that of a token of the interior")
    right.set_yscale("log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=6)
    return png_of(figure)
