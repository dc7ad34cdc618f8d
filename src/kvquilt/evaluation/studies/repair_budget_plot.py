"""Pictures of a study of the repair budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvquilt.evaluation.studies.interference import PLACES
from kvquilt.evaluation.studies.repair_budget_arms import NONE, called
from kvquilt.picture import new_figure, png_of

_COLOURS = {"I0": "C7", "I1": "C2", "I2": "C0", "I3": "C3"}
_STYLES: dict[str, str] = dict(zip(PLACES, ("o-", "s--", "^:"), strict=True))


def pictures(found: Mapping[str, Any]) -> dict[str, bytes]:
    """PNG by file name, of the parts that were measured.

    ``structure.png``: KL and damage of pure reuse by number of distractors, and what is left of KL when they are mended
    one by one. ``budget.png``: KL of every arm. ``context.png``: distance of keys and values by layer.

    Raises:
        InputError: matplotlib, the extra ``plot``, is not installed.
    """
    made = {}
    if found["structure"] or found["attribution"]:
        made["structure.png"] = _structure(found["structure"], found["attribution"])
    if found["budget"]:
        made["budget.png"] = _budget(found["budget"])
    if any(each["distances"] for each in found["context"]):
        made["context.png"] = _context([each for each in found["context"] if each["distances"]])
    return made


def _structure(cells: Sequence[Mapping[str, Any]], curves: Sequence[Mapping[str, Any]]) -> bytes:
    kinds = list(dict.fromkeys(cell["of"] for cell in cells))
    wide = 2 * len(kinds) + bool(curves)
    figure = new_figure(4.2 * wide, 4.4, "out")
    axes = figure.subplots(1, wide, squeeze=False)[0]
    for n, kind in enumerate(kinds):
        _lines(axes[2 * n : 2 * n + 2], [cell for cell in cells if cell["of"] == kind])
        axes[2 * n].set_title(f"{kind}: KL of pure reuse", fontsize=9)
        axes[2 * n + 1].set_title(f"{kind}: damage, %", fontsize=9)
    if kinds:
        named = [axis.get_legend_handles_labels() for axis in axes[: 2 * len(kinds) : 2]]
        figure.legend(*max(named, key=lambda each: len(each[1])), fontsize=7, loc="outside lower center", ncols=6)
    if curves:
        axis = axes[-1]
        for each in curves:
            points = each["curve"]
            whole = points[-1]["given"] or 1
            if points and points[0]["kl"] > 0:
                shares = [100 * point["kl"] / points[0]["kl"] for point in points]
                axis.plot([100 * point["given"] / whole for point in points], shares, "o-", label=each["of"])
        axis.set_xlabel("others with full prefill's rows, %")
        axis.set_title("attribution: KL left, %", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3)
    return png_of(figure)


def _lines(axes: Sequence[Any], cells: Sequence[Mapping[str, Any]]) -> None:
    series: dict[tuple[str, str], list[tuple[int, float, float | None]]] = {}
    for cell in cells:
        none = next((arm for arm in cell["arms"] if arm["arm"] == NONE and "kl" in arm), None)
        if none is not None:
            key = cell["structure"], cell["place"] if cell["distractors"] else ""
            series.setdefault(key, []).append((cell["distractors"], none["kl"]["value"], none.get("damage")))
    for (structure, place), points in series.items():
        points.sort(key=lambda point: point[0])
        look = {"color": _COLOURS[structure], "label": f"{structure} {place}".strip(), "markersize": 4}
        style = _STYLES.get(place, "d")
        axes[0].plot([k for k, _, _ in points], [kl for _, kl, _ in points], style, **look)
        known = [(k, 100 * damage) for k, _, damage in points if damage is not None]
        axes[1].plot([k for k, _ in known], [damage for _, damage in known], style, **look)
    axes[1].set_ylim(-2, 102)
    for axis in axes:
        axis.set_xticks(sorted({cell["distractors"] for cell in cells}))
        axis.set_xlabel("distractors")


def _budget(rows: Sequence[Mapping[str, Any]]) -> bytes:
    most = max(len(each["arms"]) for each in rows)
    figure = new_figure(6.4 * len(rows), 0.28 * most + 1.4, "out")
    axes = figure.subplots(1, len(rows), squeeze=False)[0]
    for axis, each in zip(axes, rows, strict=True):
        arms = sorted((arm for arm in each["arms"] if "kl" in arm), key=lambda arm: -arm["kl"]["value"])
        chosen = (each["chosen"] or {}).get("arm")
        at = list(range(len(arms)))
        values = [arm["kl"]["value"] for arm in arms]
        low = [max(0.0, arm["kl"]["value"] - arm["kl"]["low"]) for arm in arms]
        high = [max(0.0, arm["kl"]["high"] - arm["kl"]["value"]) for arm in arms]
        colours = ["C1" if arm["arm"] == chosen else "C0" for arm in arms]
        axis.barh(at, values, xerr=[low, high], color=colours, height=0.7, error_kw={"lw": 0.8})
        names = [called(arm["arm"]) + (f" ({arm['refused']} refused)" if arm["refused"] else "") for arm in arms]
        axis.set_yticks(at, names, fontsize=7)
        axis.set_xlabel("KL to full prefill, nats per token")
        axis.set_title(f"{each['of']}, budget {each['budget']}, {each['items']} items", fontsize=9)
        axis.grid(alpha=0.3, axis="x")
    return png_of(figure)


def _context(rows: Sequence[Mapping[str, Any]]) -> bytes:
    figure = new_figure(8.4, 3.4 * len(rows), "out")
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for line, each in zip(axes, rows, strict=True):
        for axis, side in zip(line, ("keys", "values"), strict=True):
            for name, sides in each["distances"].items():
                if sides is not None:
                    axis.plot(sides[side]["l2"], "o-", markersize=3, label=called(name))
            axis.set_title(f"{each['of']}: {side}, relative L2 to full prefill", fontsize=9)
            axis.set_xlabel("layer")
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    return png_of(figure)
