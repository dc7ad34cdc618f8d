"""How many rows of a prompt are read at once while others stream: as many as cost these no more than a step."""

from __future__ import annotations

FIRST, LEAST, MOST = 16, 4, 512
_AIM = 0.9  # of a step: all is measured with noise, and what is aimed at is a bound
_NEWEST = 0.25  # what the newest measurement counts
_AGAIN = 32  # steps after which one goes without a prompt's rows, to be measured
_TICK = 1e-4  # seconds: shorter than any step, and what a clock may not tell from none


class Pace:
    """Follows what steps and rows take on this machine, whatever its kernels and however many stream.

    The seconds of rows are no multiple of their number, since the weights are read once for all of them; so the numbers
    are moved by measuring, and no formula says them. Not locked: two threads at once may lose a measurement, no more.
    """

    def __init__(self) -> None:
        self._portion = self._riding = float(FIRST)
        self._steps: dict[int, float] = {}  # seconds by how many stream
        self._since = 0
        self.step = 0.0  # seconds of the latest number of streams' step without rows of a prompt; 0 before any

    @property
    def portion(self) -> int:
        """Rows of a portion between two steps, all sequences together."""
        return int(self._portion)

    def riding(self, streams: int) -> int:
        """Rows that may ride along with the next step of so many streams; 0 where it is to be measured without."""
        self._since += 1
        return 0 if streams not in self._steps or self._since > _AGAIN else int(self._riding)

    def step_took(self, streams: int, rows: int, seconds: float) -> None:
        """A step of so many streams, with so many rows of a prompt."""
        if not rows:
            self._since = 0
            if self._steps:  # a pause of the machine is no step, and a clock that stands still tells none
                seconds = max(_TICK, min(2 * self.step + _TICK, seconds))
            before = self._steps.get(streams, seconds)
            self.step = self._steps[streams] = before + _NEWEST * (seconds - before)
        elif 2 * rows >= self._riding:  # the rest of a prompt says little
            step = self._steps[streams]
            self._riding = _moved(self._riding, rows, step, seconds - step)

    def portion_took(self, rows: int, seconds: float) -> None:
        """A portion of a prompt between two steps."""
        if self._steps and 2 * rows >= self._portion:
            self._portion = _moved(self._portion, rows, self.step, seconds)


def _moved(now: float, rows: int, step: float, seconds: float) -> float:
    """The number `now` nearer to that of which a step's time is taken, after `rows` took `seconds`."""
    fits = rows * min(2.0, max(0.5, _AIM * step / max(seconds, 1e-9)))
    return min(MOST, max(LEAST, now + _NEWEST * (fits - now)))
