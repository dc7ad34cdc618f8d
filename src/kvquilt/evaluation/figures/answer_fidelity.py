"""How far an arm's distributions are from full prefill's, over many rows: aggregates of what was measured per row.

A row predicts one answer token. Rows are `first` (the first token of an answer), `self` (full prefill's own greedy
answer) or `gold` (the accepted answer and its end); the arms are compared on the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvquilt.errors import InputError

_LEAST_KL = 1e-6  # nats of pure reuse, below which there is nothing to recover


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL(full || arm) in nats over rows, and the share of rows with the same most likely token."""

    rows: int
    mean: float
    median: float
    p95: float
    max: float
    top1: float


def divergence(kl: Sequence[float], agree: Sequence[float]) -> Divergence:
    """Of all rows together.

    Raises:
        InputError: no rows, of different number, or a KL that is not finite.
    """
    rows = _rows("kl", kl)
    if len(agree) != len(rows):
        raise InputError("agree", f"must be of as many rows as kl, {len(rows)}", len(agree))
    return Divergence(
        rows=len(rows),
        mean=float(rows.mean()),
        median=float(np.median(rows)),
        p95=float(np.quantile(rows, 0.95)),
        max=float(rows.max()),
        top1=float(np.mean(agree)),
    )


def kl_recovery(arm: Sequence[float], none: Sequence[float]) -> float | None:
    """The share of pure reuse's mean KL that the arm takes away: 0 is pure reuse, 1 is full prefill.

    ``None`` where pure reuse is as good as full prefill, so that there is nothing to take away.

    Raises:
        InputError: no rows, or other rows than pure reuse has.
    """
    of = _rows("none", none)
    mine = _rows("arm", arm)
    if len(of) != len(mine):
        raise InputError("arm", f"must be of pure reuse's rows, {len(of)}", len(mine))
    return None if of.mean() < _LEAST_KL else float(1 - mine.mean() / of.mean())


def nll_gap(arm: Sequence[float], full: Sequence[float]) -> float:
    """Mean over gold rows of the nats by which the arm finds the accepted token less likely than full prefill does.

    Raises:
        InputError: no rows, or other rows than full prefill has.
    """
    mine, of = _rows("arm", arm), _rows("full", full)
    if len(of) != len(mine):
        raise InputError("arm", f"must be of full prefill's rows, {len(of)}", len(mine))
    return float((mine - of).mean())


def _rows(field: str, values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    rows = np.asarray(values, dtype=np.float64).reshape(-1)
    if not len(rows) or not np.isfinite(rows).all():
        raise InputError(field, "must be finite numbers, of at least one row")
    return rows
