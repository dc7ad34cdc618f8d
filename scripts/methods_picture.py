"""docs/methods.svg: fidelity against time to the first token and against charged share, one line per method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from methods_measured import RESULTS, ROOT, method_of, results_of

from kvquilt.repair.presets import METHODS

PICTURE = ROOT / "docs" / "methods.svg"
_AMOUNTS = ("k", "documents", "last")  # options that say how much, as a budget does
Point = tuple[float, float, float]  # charged %, how many times sooner, fidelity


def lines_of(arms: dict[str, dict[str, Any]]) -> dict[str, list[Point]]:
    """The points of every method that was measured as the presets have it, whatever its budget; cheapest first."""
    lines: dict[str, list[Point]] = {}
    for arm, row in arms.items():
        options = [o for o in arm.partition(":")[2].split(",") if "=" in o]
        changed = any(o.partition("=")[0] not in _AMOUNTS for o in options)
        if method_of(arm) in METHODS and "mean_kl" in row and not changed:
            point = 100 * row["charged_share"], row["first_token_ratio"], math.exp(-row["mean_kl"])
            lines.setdefault(method_of(arm), []).append(point)
    return {name: sorted(lines[name]) for name in METHODS if name in lines}


def draw_methods(folder: Path = RESULTS, picture: Path = PICTURE) -> bool:
    """Draw the picture, a row of panels per run; False, and nothing drawn, where there is no run yet."""
    runs = results_of("quality", folder)
    if not runs:
        return False
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvquilt"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(runs), 2, figsize=(10, 0.4 + 3.8 * len(runs)), sharey="row", squeeze=False)
    colours = {name: plt.get_cmap("tab20")(n % 20) for n, name in enumerate(METHODS)}
    shown: dict[str, Any] = {}
    for run, (left, right) in zip(runs, panels, strict=True):
        cell = max(run["cells"], key=lambda name: run["cells"][name]["n"])
        for name, points in lines_of(run["cells"][cell]["arms"]).items():
            charged, sooner, fidelity = zip(*points, strict=True)
            mark = {
                "color": colours[name],
                "marker": "os^D"[list(METHODS).index(name) % 4],
                "markersize": 4,
                "linewidth": 1,
            }
            shown[name] = left.plot(sooner, fidelity, **mark)[0]
            right.plot(charged, fidelity, **mark)
        for axes in (left, right):
            shown["full prefill"] = axes.axhline(1.0, color="black", linewidth=1, linestyle=":")
            axes.grid(alpha=0.3)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        left.set_xlabel("times sooner to the first token than full prefill", fontsize=8)
        right.set_xlabel("charged, % of the token-layers that reuse saves", fontsize=8)
        left.set_ylabel("fidelity, exp(-mean KL)", fontsize=8)
        count, length = cell.split("-")
        left.set_title(
            f"{run['model']}, {count} {length} documents, n={run['cells'][cell]['n']}", fontsize=8, loc="left"
        )
    figure.tight_layout(rect=(0, 0, 0.84, 1))
    figure.legend(shown.values(), shown.keys(), fontsize=7, loc="center right", frameon=False)
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)
    return True
