"""The picture of a hit-rate study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvquilt.evaluation.studies.hit_rate_study import SWEPT
from kvquilt.picture import new_figure, png_of

_MOST = 6  # panels


def plot(result: dict[str, Any]) -> bytes:
    """PNG of what `HitRateStudy.run` gave: token hit rate by exponent, a panel for each of the other cells, and the
    last cell's over time.

    Raises:
        InputError: matplotlib, the extra ``plot``, is not installed.
    """
    rows: Sequence[dict[str, Any]] = result["rows"]
    beside = [name for name in SWEPT if name != "exponent"]
    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault(tuple(row[name] for name in beside), []).append(row)
    shown = list(panels.values())[:_MOST]
    figure = new_figure(4.2 * (len(shown) + 1), 4.6, "plot")
    axes = figure.subplots(1, len(shown) + 1, sharey=True, squeeze=False)[0]
    names = [arm["arm"] for arm in rows[0]["arms"]]
    for axis, cell in zip(axes, shown, strict=False):
        cell = sorted(cell, key=lambda row: row["exponent"])
        for n, name in enumerate(names):
            rates = [100 * row["arms"][n]["token_hit_rate"] for row in cell]
            axis.plot([row["exponent"] for row in cell], rates, _style(name), color=f"C{n}", label=name, markersize=4)
        axis.set_xlabel("exponent of Zipf's law")
        first = cell[0]
        axis.set_title(
            f"{first['documents']} documents, {first['per_request']} a prompt, {first['order']}\n"
            f"{first['capacity_bytes'] / 1e9:g} GB = {first['capacity_tokens']} tokens",
            fontsize=9,
        )
    for n, arm in enumerate(rows[-1]["arms"]):
        over = arm["over_time"]
        at = [100 * (k + 0.5) / len(over) for k in range(len(over))]
        axes[-1].plot(at, [100 * rate for rate in over], _style(arm["arm"]), color=f"C{n}", markersize=3)
    axes[-1].set_xlabel("share of the requests so far, %")
    axes[-1].set_title(f"over time, {rows[-1]['documents']} documents, exponent {rows[-1]['exponent']:g}", fontsize=9)
    axes[0].set_ylabel("tokens that need not be computed, %")
    axes[0].set_ylim(0, 100)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4)
    figure.suptitle(f"Hit rates, cache of {result['of']['name']}")
    return png_of(figure)


def _style(arm: str) -> str:
    return "o:" if arm.endswith("unbounded") else "s--" if arm.startswith("prefix") else "o-"
