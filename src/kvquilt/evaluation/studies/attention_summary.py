"""What a study of attention has found, from its lines alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import InputError
from kvquilt.evaluation.run.controls import failed
from kvquilt.evaluation.run.folder import EvaluationFolder, Line
from kvquilt.evaluation.studies.attention_forms import checked
from kvquilt.evaluation.studies.attention_measures import BINS, FIRST, REGIONS
from kvquilt.evaluation.studies.attention_run import KIND, NONE

Array = NDArray[np.float64]
VIEWS = ("raw", "within")
_MEANS = ("raw", "within", "by_position", "density", "interior", "cosine", "mass")
_SUMS = ("error", "norm")


@dataclass(eq=False, slots=True)
class _Gathered:
    """One arm's lines so far: sums, not the lines."""

    refused: int = 0
    items: dict[str, dict[str, Array]] = field(default_factory=dict)
    seen: list[float] = field(default_factory=list)
    totals: dict[str, Array] = field(default_factory=dict)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        if line["refused"] is not None:
            self.refused += 1
            return
        self.seen.append(line["seen"])
        arrays = {name: np.array(line[name], dtype=np.float64) for name in (*_MEANS, *_SUMS)}
        # an item's mean over layers and heads, of each region
        self.items[line["item"]] = {view: _mean(arrays[view].reshape(-1, len(REGIONS))) for view in VIEWS}
        for name, array in arrays.items():
            there = ~np.isnan(array)
            self.totals[name] = self.totals.get(name, 0.0) + np.where(there, array, 0.0)
            self.counts[name] = self.counts.get(name, np.int64(0)) + there

    def mean(self, name: str) -> Array:
        """By layer and whatever else it goes by; NaN of nothing."""
        with np.errstate(invalid="ignore"):
            mean: Array = self.totals[name] / self.counts[name]
        return mean


@dataclass(frozen=True, eq=False, slots=True)
class ArmAttention:
    """One arm.

    Attributes:
        items: that it was measured on; `refused`: on which it could not run.
        distance: by view (``raw``, ``within``) and region: mean difference of a token's weight to full prefill's.
        standard_error: of it, over items.
        ratio: of it to pure reuse's on the same items, a ratio of means; below 1 is nearer to full prefill.
        density: weight of a document's first tokens, each over that of a token of its interior.
        nrmse, cosine, mass: of what is retrieved, means over layers and heads.
        seen: share of the documents' tokens that have slots.
        heads: ``[layers, heads]``: raw distance in the interior, and NRMSE. places: ``[layers, bins]``: raw distance.
    """

    method: str
    items: int
    refused: int
    distance: dict[str, dict[str, float]]
    standard_error: dict[str, dict[str, float]]
    ratio: dict[str, dict[str, float]]
    density: list[float]
    nrmse: float
    cosine: float
    mass: float
    seen: float
    heads: dict[str, Array] = field(repr=False)
    places: Array = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, NaN as null."""
        told = {name: _short(getattr(self, name)) for name in ArmAttention.__slots__}
        return {**told, "method": self.method, "items": self.items, "refused": self.refused}


@dataclass(frozen=True, eq=False, slots=True)
class AttentionSummary:
    """All arms; `refused`: why nothing is said of one, since a control of it failed."""

    about: dict[str, Any]
    arms: tuple[ArmAttention, ...]
    refused: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return {"about": self.about, "refused": self.refused, "arms": [arm.as_dict() for arm in self.arms]}


def summarise_attention(folder: Path) -> AttentionSummary:
    """Reads the folder line by line.

    Raises:
        InputError: no study of attention is there, or not a line of it yet.
        IntegrityError: the folder is damaged.
    """
    files = EvaluationFolder(folder)
    stored = files.read_run()
    if stored is None or stored["run"].get("kind") != KIND:
        raise InputError("folder", "holds no study of attention", str(folder))
    gathered: dict[str, _Gathered] = {}
    for line in checked(files.lines, files.each_line()):
        gathered.setdefault(line["method"], _Gathered()).add(line)
    if not any(arm.items for arm in gathered.values()):
        raise InputError("folder", "holds no line yet", str(folder))
    base = gathered.get(NONE, _Gathered()).items
    arms = tuple(_arm(name, arm, base) for name, arm in gathered.items() if arm.items)
    return AttentionSummary(stored["about"], arms, failed(stored["controls"]))


def _arm(name: str, arm: _Gathered, base: dict[str, dict[str, Array]]) -> ArmAttention:
    distance, errors, ratio = {}, {}, {}
    for view in VIEWS:
        mine = np.stack([each[view] for each in arm.items.values()])
        distance[view] = _named(_mean(mine))
        errors[view] = _named(_standard_error(mine))
        both = [item for item in arm.items if item in base]
        own, theirs = (np.array([held[i][view] for i in both]).reshape(-1, 3) for held in (arm.items, base))
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio[view] = _named(_mean(own) / _mean(theirs))
    with np.errstate(invalid="ignore", divide="ignore"):
        nrmse = np.sqrt(arm.totals["error"] / arm.totals["norm"])
        density = _mean(arm.mean("density")) / _mean(arm.mean("interior")[:, None])
    assert density.shape == (FIRST,)
    places = arm.mean("by_position")
    assert places.shape[1] == BINS
    return ArmAttention(
        name, len(arm.items), arm.refused, distance, errors, ratio, density.tolist(), _over_all(nrmse),
        _over_all(arm.mean("cosine")), _over_all(arm.mean("mass")), float(np.mean(arm.seen)),
        {"distance": arm.mean("raw")[..., REGIONS.index("interior")], "nrmse": nrmse}, places,
    )  # fmt: skip


def _named(values: Array) -> dict[str, float]:
    return dict(zip(REGIONS, values.tolist(), strict=True))


def _mean(rows: Array) -> Array:
    """Over the first dimension, without NaN; of nothing, NaN."""
    there = ~np.isnan(rows)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(there, rows, 0.0).sum(0) / there.sum(0)
    return mean


def _standard_error(rows: Array) -> Array:
    """Over the first dimension; NaN of fewer than two."""
    there = ~np.isnan(rows)
    count, squares = there.sum(0), np.where(there, (rows - _mean(rows)) ** 2, 0.0).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        error: Array = np.where(count > 1, np.sqrt(squares / (count - 1) / count), np.nan)
    return error


def _over_all(values: Array) -> float:
    return float(_mean(values.reshape(-1, 1))[0])


def _short(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _short(value.tolist())
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
