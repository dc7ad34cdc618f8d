"""How many rows of a prompt are read at once while others stream: as many as take no longer than a step of theirs."""

from __future__ import annotations

FIRST, LEAST, MOST = 16, 4, 512
_AIM = 0.9  # of a step: both are measured with noise, and what is aimed at is a bound
_NEWEST = 0.25  # what the newest measurement counts


class Pace:
    """Follows what steps and portions take on this machine, whatever its kernels and however many stream.

    A portion's seconds are no multiple of its rows, since the weights are read once for all of them; so the number is
    moved by measuring, and no formula says it. Told by whoever has the turn: not locked.
    """

    def __init__(self) -> None:
        self._rows = float(FIRST)
        self._step: float | None = None

    @property
    def rows(self) -> int:
        """Of a portion, all sequences together."""
        return int(self._rows)

    def step_took(self, seconds: float) -> None:
        """One step of all streams together."""
        before = seconds if self._step is None else self._step
        self._step = before + _NEWEST * (seconds - before)

    def portion_took(self, rows: int, seconds: float) -> None:
        """A portion of a prompt beside them. Before any step was measured, or of a short rest, it says nothing."""
        if self._step is None or 2 * rows < self.rows:
            return
        fits = rows * min(2.0, max(0.5, _AIM * self._step / max(seconds, 1e-9)))
        self._rows = min(MOST, max(LEAST, self._rows + _NEWEST * (fits - self._rows)))
