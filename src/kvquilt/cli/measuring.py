"""What the verbs share that measure methods on a task: options, what their folders say, whose words errors are in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvquilt.cli.common import arms_and_writers, warn
from kvquilt.cli.work import check_helper, check_writers
from kvquilt.errors import ContextLengthError, InputError

if TYPE_CHECKING:
    from kvquilt.config import Settings
    from kvquilt.engine import Engine
    from kvquilt.evaluation.tasks.task import Task

OutFlag = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder that is filled; one that was stopped goes on.")
]
SplitFlag = Annotated[str, typer.Option("--split", metavar="SPLIT", help="tuning or evaluation.")]
SeedFlag = Annotated[int, typer.Option("--seed", metavar="N", help="Of what is drawn for the items.")]
NewTokensFlag = Annotated[
    int | None,
    typer.Option("--new-tokens", min=1, metavar="N", help="Longest answer; by default the task's own limit."),
]


@contextmanager
def told_by_option(**options: str) -> Iterator[None]:
    """Errors about what was given speak of the option: `options` by what the field is called inside."""
    try:
        yield
    except InputError as error:
        if type(error) not in (InputError, ContextLengthError) or error.field not in options:
            raise
        raise type(error)(options[error.field], error.rule, error.got) from None


@contextmanager
def told_within(option: str) -> Iterator[None]:
    """Errors about a part of what the option was given name the option before it."""
    try:
        yield
    except InputError as error:
        if type(error) is not InputError:
            raise
        whole = error.field in ("task", "method", "methods")
        raise InputError(option, error.rule if whole else f"{error.field}: {error.rule}", error.got) from None


def task_of(written: str, engine: Engine | None = None) -> Task:
    """The task of ``--task``; with an engine, its texts are as long in the tokens of the model as they are to be.

    Raises:
        InputError: names the option; LeakageError.
    """
    from kvquilt.evaluation.tasks.by_name import find_task
    from kvquilt.tokens import encoder

    parts: dict[str, Any] = {}
    if engine is not None:
        encode = encoder(engine.model.tokenizer).encode
        parts["length"] = lambda text: len(encode(text))
    with told_within("--task"):
        return find_task(written, **parts)


def arms_of(option: str, written: str, given: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Arms as they are written, and the folders of writers: those that are given, and those that the arms bring.

    Raises:
        InputError: names the option: an arm that is none.
    """
    from kvquilt.evaluation.run.arms import find_arm

    with told_within(option):
        names, folders = arms_and_writers(written, given)
        for name in names:
            find_arm(name)
    return names, folders


def check_methods(names: Sequence[str], writers: Sequence[str], settings: Settings) -> None:
    """Whether what these arms need, a helper model or trained writers, can be there, before a model is loaded.

    Raises:
        InputError: it cannot.
    """
    from kvquilt.evaluation.run.arms import find_arm

    methods = [find_arm(name).method.name for name in names]
    check_helper(methods, settings)
    with told_by_option(writer="--writer"):
        check_writers(methods, writers)


def tell_skipped(task: Task) -> None:
    """What the file holds and no item has, on stderr."""
    for reason, count in task.skipped.items():
        if count:
            warn(f"left out, {reason}: {count}")


def check_free(folder: Path) -> None:
    """Before a model is loaded for nothing.

    Raises:
        InputError: another process writes into the folder, or it is a file.
        StoreUnavailableError: it cannot be written.
    """
    from kvquilt.files import held

    if folder.exists() and not folder.is_dir():
        raise InputError("--out", "must be a folder", str(folder))
    with held(folder, "--out", "writes into"):
        pass


def about(engine: Engine, writers: Sequence[str], **more: Any) -> dict[str, Any]:
    """What a reader of the folder should know; no folder of this machine is in it."""
    from kvquilt.bench import environment, portable

    model = engine.model
    return {
        **more,
        "model": portable(model.name),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "writers": [portable(each) for each in writers],
        **environment(),
    }
