"""What a long command says on stderr while it goes on: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from kvquilt.cli.common import warn

_EVERY = 60.0  # seconds between two lines
TRYING = "a new folder first tries every method on its first item; then prompts are counted"


class Watch:
    """A line for the first of what is counted, then one a minute, and one for the last."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._began: float | None = None
        self._last = self._made = 0
        self._next = 0.0

    def __call__(self, done: int, total: int, now: str = "") -> None:
        """So many of `total` are done, `now` the last of them."""
        self._made += 0 if self._began is None else done - self._last
        self._at(done)
        self._show(done, total, now)

    def stands(self, done: int, total: int, now: str) -> None:
        """So many are, without anything done for it now: what comes next is `now`."""
        self._at(done)
        self._next = 0.0
        self._show(done, total, now)

    def remaining(self, done: int, total: int) -> float | None:
        """Seconds, by what was done since the first call; None before anything was."""
        if self._began is None or not self._made:
            return None
        return (perf_counter() - self._began) * (total - done) / self._made

    def _at(self, done: int) -> None:
        self._began = perf_counter() if self._began is None else self._began
        self._last = done

    def _show(self, done: int, total: int, now: str) -> None:
        if perf_counter() < self._next and done < total:
            return
        self._next = perf_counter() + _EVERY
        warn(", ".join(filter(None, (now, f"{done:,} of {total:,} {self.unit}", self._to_go(done, total)))))

    def _to_go(self, done: int, total: int) -> str:
        seconds = self.remaining(done, total)
        return "" if seconds is None else f"{_time(seconds)} to go"


class _Bar(Watch):
    def __init__(self, unit: str, bar: Any, label: str) -> None:
        super().__init__(unit)
        self._bar, self._task = bar, bar.add_task(label, total=None, now="")

    def _show(self, done: int, total: int, now: str) -> None:
        text = "  ".join(filter(None, (self._to_go(done, total), now)))
        self._bar.update(self._task, completed=done, total=total, now=text)


@contextmanager
def watching(label: str, unit: str, first: str = "") -> Iterator[Watch]:
    """A bar until the end, or lines, which begin with what is `first`."""
    if not sys.stderr.isatty():
        if first:
            warn(first)
        yield Watch(unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    # what is shown has names of arms and folders: no markup
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(unit, bar, label)


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
