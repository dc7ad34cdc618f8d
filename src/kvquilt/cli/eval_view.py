"""What `kvquilt eval` shows while a run goes on, and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from kvquilt.cli.common import echo_json, echo_table, warn
from kvquilt.cli.watching import TRYING, watching
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.evaluation.figures.summary import Summary
    from kvquilt.evaluation.run.run import Finished, Run, RunProgress
    from kvquilt.evaluation.run.timed_prompt import TimedPrompt


def go(run: Run, as_json: bool, timed: int) -> Finished:
    """Run, watched on stderr; then what came of it.

    Args:
        timed: on how many prompts first tokens are timed.
    """
    from kvquilt.evaluation.figures.summarising import summarise

    seen: list[RunProgress] = []
    try:
        with watching("evaluating", "prompts", TRYING) as watch:

            def each(progress: RunProgress) -> None:
                seen[:] = [progress]
                watch(progress.done, progress.total, progress.method)

            finished = run.go(each)
        timing = _timed(run, finished, timed)
    except KeyboardInterrupt:
        stand = f"{_kept(run, seen[0].total)} of {seen[0].total} lines are" if seen else "what is finished is"
        warn(f"stopped; {stand} kept in {run.folder}. The same command goes on from there.")
        raise
    summary = summarise(finished, timing=timing, kinds={item.id: item.kind for item in run.items})
    if as_json:
        echo_json({"folder": str(run.folder), "about": dict(run.about), **summary.as_dict()})
    else:
        _show(run, summary)
    return finished


def _kept(run: Run, total: int) -> int:
    """Lines that need not be made again: an item's are written together, and part of them begins anew."""
    from kvquilt.evaluation.run.folder import EvaluationFolder

    there = EvaluationFolder(run.folder).count()
    return there - there % (total // len(run.items))


def _timed(run: Run, finished: Finished, prompts: int) -> Sequence[TimedPrompt]:
    """What is timed, or was; a prompt that cannot be is no reason to withhold the lines."""
    from kvquilt.evaluation.run.in_turns import time_run
    from kvquilt.evaluation.run.timed_prompt import read_timing

    try:
        return time_run(run, finished, prompts, lambda n, of: warn(f"timing first tokens, prompt {n} of {of}"))
    except InputError as error:
        warn(f"first tokens were not timed: {error}")
        return read_timing(run.folder)


def _show(run: Run, summary: Summary) -> None:
    from kvquilt.evaluation.figures.sentences import sentences
    from kvquilt.evaluation.figures.tables import tables, verdict

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
