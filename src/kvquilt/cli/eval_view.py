"""What `kvquilt eval` shows while a run goes on, and at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from kvquilt.cli.common import echo_json, echo_table, warn
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.evaluation.run import Finished, Run, RunProgress
    from kvquilt.evaluation.summary import Summary
    from kvquilt.evaluation.timed_prompt import TimedPrompt

_EVERY = 60.0  # seconds between two lines off a terminal


def go(run: Run, as_json: bool, timed: int) -> Finished:
    """Run, with a bar where stderr is a terminal and a line a minute where not; then what came of it.

    Args:
        timed: on how many prompts first tokens are timed.
    """
    from kvquilt.evaluation.summarising import summarise

    seen: list[RunProgress] = []
    try:
        with _watching() as report:

            def each(progress: RunProgress) -> None:
                seen[:] = [progress]
                report(progress)

            finished = run.go(each)
        timing = _timed(run, finished, timed)
    except KeyboardInterrupt:
        stand = f"{seen[0].kept} of {seen[0].total} lines are" if seen else "what is finished is"
        warn(f"stopped; {stand} kept in {run.folder}. The same command goes on from there.")
        raise
    summary = summarise(finished, timing=timing, kinds={item.id: item.kind for item in run.items})
    if as_json:
        echo_json({"folder": str(run.folder), "about": dict(run.about), **summary.as_dict()})
    else:
        _show(run, summary)
    return finished


def _timed(run: Run, finished: Finished, prompts: int) -> Sequence[TimedPrompt]:
    """What is timed, or was; a prompt that cannot be is no reason to withhold the lines."""
    from kvquilt.evaluation.run_timing import time_run
    from kvquilt.evaluation.timed_prompt import read_timing

    try:
        return time_run(run, finished, prompts, lambda n, of: warn(f"timing first tokens, prompt {n} of {of}"))
    except InputError as error:
        warn(f"first tokens were not timed: {error}")
        return read_timing(run.folder)


def _show(run: Run, summary: Summary) -> None:
    from kvquilt.evaluation.sentences import sentences
    from kvquilt.evaluation.tables import tables, verdict

    groups = "" if summary.groups == summary.items else f" in {summary.groups} groups"
    split = f"Split {run.about['split']}: " if "split" in run.about else ""
    typer.echo(f"{split}{summary.items} items{groups}. {verdict(summary.documents_help)}")
    for table in tables(summary, run.config.metric.grader):
        typer.echo(f"\n{table.title}")
        echo_table(table.head, table.rows)
        for note in table.notes:
            typer.echo(note)
    typer.echo()
    for sentence in sentences(summary):
        typer.echo(sentence)
    typer.echo(f"The run is in {run.folder}; `kvquilt report {run.folder}` makes a page of it.")


@contextmanager
def _watching() -> Iterator[Callable[[RunProgress], object]]:
    if not sys.stderr.isatty():
        warn("a new run first tries every method on its first item; then prompts are counted")
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("evaluating", total=None, now="")

        def report(progress: RunProgress) -> None:
            now = f"{_time(progress.remaining)} to go  {progress.method}"
            bar.update(task, completed=progress.done, total=progress.total, now=now)

        yield report


class _Lines:
    """A line for the first result, then one a minute, and one for the last."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, progress: RunProgress) -> None:
        if progress.seconds < self._next and progress.done < progress.total:
            return
        self._next = progress.seconds + _EVERY
        warn(f"{progress.done} of {progress.total} prompts, {_time(progress.remaining)} to go")


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
