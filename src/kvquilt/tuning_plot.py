"""The picture of a tuning run: quality against charged budget, one line per method."""

from __future__ import annotations

from kvquilt.picture import new_figure, png_of
from kvquilt.repair.written import without_budget
from kvquilt.tuning_report import Trial, TuneReport


def plot(report: TuneReport) -> bytes:
    """PNG of the report.

    Raises:
        InputError: matplotlib, the extra ``plot``, is not installed.
    """
    figure = new_figure(9, 5.5, "out")
    from matplotlib import colormaps

    axes = figure.add_subplot()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)  # type: ignore[attr-defined]  # a list of colours has them
    lines: dict[str, list[Trial]] = {}
    for trial in report.trials:
        lines.setdefault(without_budget(trial.method), []).append(trial)
    for name, trials in lines.items():
        points = sorted((100 * t.charged, t.quality) for t in trials)
        style = "--" if "isolated" in name else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=4, label=name)
    axes.axhline(report.target, color="black", linewidth=1, linestyle=":", label=f"target {report.target:g}")
    if report.held_out is not None:
        held = report.held_out
        axes.plot(100 * held.charged, held.quality, "*", color="black", markersize=14, label=f"{held.method}, held out")
    axes.set_xlabel("charged budget, % of the token-layers that reuse saves")
    axes.set_ylabel(f"{report.judged_by} (full prefill = 1)")
    axes.set_title(f"{report.model}: quality against budget")
    axes.grid(alpha=0.3)
    figure.legend(fontsize=7, loc="outside right upper")
    return png_of(figure)
