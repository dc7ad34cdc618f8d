"""What `kvquilt train` shows while a trainer runs, and at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from kvquilt.cli.common import echo_json, warn

if TYPE_CHECKING:
    from kvquilt.training.folder import RunFolder
    from kvquilt.training.progress import Progress
    from kvquilt.training.trainer import Trainer


def run(trainer: Trainer, as_json: bool) -> None:
    """Train, with a bar where stderr is a terminal and a line per validation where not; then what came of it."""
    from kvquilt.training.folder import RunFolder

    files = RunFolder(trainer.folder)
    try:
        with _watching() as report:
            trainer.train(report)
    except KeyboardInterrupt:
        if trainer.world.main:
            warn(f"{_stand(trainer)} The same command goes on from there.")
        raise
    finally:
        if trainer.world.main and trainer.place is not None and trainer.place.step:
            _draw(files, f"{trainer.config.kind} for {trainer.model.name}")
    if trainer.world.main:
        _show(trainer, as_json)


def _stand(trainer: Trainer) -> str:
    place = trainer.place
    if place is None or not place.step:
        return "stopped before the first step."
    has = ""
    if place.best is not None:
        has = f"; the best writer so far has a KL of {place.best:.4f} on held-out documents"
    if place.best is not None and not place.best_step:
        has = "; none was nearer than the start yet"
    return f"stopped after step {place.step}, which is kept in {trainer.folder}{has}."


def _show(trainer: Trainer, as_json: bool) -> None:
    place = trainer.place
    if place is None:  # `train` has returned, so there is one
        return
    result: dict[str, Any] = {
        "writer": str(trainer.folder),
        "kind": trainer.config.kind,
        "model": trainer.model.name,
        "exercises": len(trainer.exercises),
        "held_out": len(trainer.held_out),
        "steps": place.step,
        "seconds": place.seconds,
        "before": place.before,
        "best": place.best,
        "best_step": place.best_step,
        "unanswered": place.empty,
        "config": trainer.config.as_dict(),
    }
    if as_json:
        echo_json(result)
        return
    typer.echo(f"trained   {place.step} steps over {len(trainer.exercises)} sets in {place.seconds:.0f} s")
    if place.before is not None and place.best is not None:
        typer.echo(
            f"held out  KL to full prefill {place.best:.4f} nats per answer token (step {place.best_step}); pure reuse "
            f"{place.before['none']:.4f}, rounding alone {max(0.0, place.before['full']):.1e}"
        )
    if place.before is not None and place.best is not None and place.best > place.before["none"]:
        warn("pure reuse is nearer to full prefill than this writer: train longer, on more sets, or with another rate")
    typer.echo(f"writer    {trainer.folder}: use it with `--writer {trainer.folder}` in compile and ask")


def _draw(files: RunFolder, title: str) -> None:
    from kvquilt.errors import InputError
    from kvquilt.files import write_atomically
    from kvquilt.training.curve import curve

    try:
        write_atomically(files.path / "curve.png", curve(files.lines(), title))
    except InputError as error:
        warn(str(error))
    except OSError as error:
        warn(f"the curve could not be written to {files.path}: {error.strerror}")


@contextmanager
def _watching() -> Iterator[Callable[[Progress], object]]:
    if not sys.stderr.isatty():
        yield _line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=None, numbers="")
        seen: list[Progress] = []
        held: list[float] = []

        def report(progress: Progress) -> None:
            seen.append(progress)
            held.extend([] if progress.validation is None else [progress.validation])
            bar.update(task, completed=progress.step, total=progress.steps, numbers=_numbers(seen[-10:], held))

        yield report


def _numbers(last: list[Progress], held: list[float]) -> str:
    """Loss per answer token over the last steps, the last validation, and questions per second."""
    tokens = max(1, sum(each.tokens for each in last))
    seconds = max(1e-9, sum(sum(each.stages.values()) for each in last))
    loss = sum(each.loss * each.tokens for each in last) / tokens
    validation = f"  held out {held[-1]:.3f}" if held else ""
    return f"loss {loss:.3f}{validation}  {sum(each.questions for each in last) / seconds:.2f} questions/s"


def _line(progress: Progress) -> None:
    if progress.validation is None and progress.step < progress.steps:
        return
    held = "" if progress.validation is None else f"held out {progress.validation:.4f}, "
    warn(f"step {progress.step} of {progress.steps}: loss {progress.loss:.4f}, {held}{progress.remaining:.0f} s to go")
