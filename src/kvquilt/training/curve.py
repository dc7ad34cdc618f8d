"""The picture of a training run, from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvquilt.errors import InputError
from kvquilt.picture import new_figure, png_of

_WINDOW = 10  # steps that the smooth line is a mean of


def curve(lines: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """PNG of a log's lines: KL per answer token over steps, and that of held-out exercises.

    Raises:
        InputError: matplotlib, the extra ``plot``, is not installed; there is no step yet.
    """
    steps = [line for line in lines if line["step"] > 0 and line["tokens"]]
    if not steps:
        raise InputError("curve", "no step is logged yet")
    figure = new_figure(8, 4.5, "curve")
    axes = figure.add_subplot()
    at = [line["step"] for line in steps]
    losses = [line["kl"] for line in steps]
    smooth = [sum(losses[max(0, n - _WINDOW + 1) : n + 1]) / min(n + 1, _WINDOW) for n in range(len(losses))]
    axes.plot(at, losses, ".", color="tab:blue", alpha=0.25, markersize=4)
    axes.plot(at, smooth, color="tab:blue", label=f"training, mean of {_WINDOW} steps")
    held = [(line["step"], line["validation"]) for line in lines if line.get("validation") is not None]
    if held:
        axes.plot(*zip(*held, strict=True), "o-", color="tab:orange", markersize=4, label="held out")
    if lines[0]["step"] == 0:
        axes.axhline(lines[0]["none"], color="black", linewidth=1, linestyle=":", label="held out, pure reuse")
    axes.set_xlabel("step")
    axes.set_ylabel("KL to full prefill per answer token, nats")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return png_of(figure)
