"""`kvquilt eval`: methods side by side on a task, against full prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvquilt.cli.common import (
    Device,
    Dtype,
    ExitCode,
    HelperFlag,
    Json,
    ModelFlag,
    Tenant,
    Threads,
    WriterFlag,
    settings_of,
)
from kvquilt.cli.measuring import (
    NewTokensFlag,
    OutFlag,
    SeedFlag,
    SplitFlag,
    about,
    arms_of,
    check_free,
    check_methods,
    task_of,
    tell_skipped,
    told_by_option,
)
from kvquilt.cli.work import open_engine
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.evaluation.run.config import RunConfig
    from kvquilt.evaluation.tasks.task import Task


def evaluate(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Option(
            metavar="TASK",
            help="biography, niah:kind=multikey, squad:PATH, jsonl:PATH, ...; options as in dialogue:PATH,unit=turn.",
        ),
    ],
    methods: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Arms, joined by commas, or by ; in quotes: methods, sempic:PATH+retrieved-document:5%, controls "
            "such as fewer-documents:2.",
        ),
    ],
    out: OutFlag,
    model: ModelFlag = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Items; by default all of the split.")] = None,
    split: SplitFlag = "evaluation",
    seed: SeedFlag = 0,
    silent: Annotated[
        str | None, typer.Option(metavar="A,B", help="Of the arms, those that need not answer: fidelity is quicker.")
    ] = None,
    new_tokens: NewTokensFlag = None,
    timed: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Prompts on which first tokens are timed by all arms in turns; 0: none."),
    ] = 1,
    helper_model: HelperFlag = None,
    writer: WriterFlag = None,
    tenant: Tenant = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Measure methods on a task: distance to full prefill, scores, damage, work; each on the same items.

    Full prefill, full prefill without documents, and full prefill in another layout (what rounding alone does) are
    always among the arms. Ctrl-C loses nothing: the same command goes on. Exit code 6: an arm failed a control, and
    nothing is said of it. `kvquilt report DIR` makes a page of the folder. All arms and columns: docs/evaluation.md.
    """
    settings, _ = settings_of(
        context, model=model, helper_model=helper_model, tenant=tenant, dtype=dtype, device=device, threads=threads
    )
    from kvquilt.bench import portable
    from kvquilt.cli.eval_view import go
    from kvquilt.evaluation.run.run import Run

    asked = task_of(task)  # whatever is wrong with it is found before a model is loaded
    names, writers = arms_of("--methods", methods, writer or ())
    if not names:
        raise InputError("--methods", "name at least one")
    quiet, _ = arms_of("--silent", silent or "")
    with told_by_option(
        methods="--methods", silent="--silent", new_tokens="--new-tokens", split="--split", folder="--out"
    ):
        config = _config(asked, names, quiet, new_tokens)
        check_methods(config.methods, writers, settings)
        asked.items(split, 1, seed=seed)
        check_free(out)
        with open_engine(settings, writers, asked.system) as engine:
            asked = task_of(task, engine)
            tell_skipped(asked)
            told = about(
                engine,
                writers,
                task=portable(task),
                split=split,
                limit=limit,
                seed=seed,
                score=asked.metric.grader,
                system=asked.system,
                skipped={reason: count for reason, count in asked.skipped.items() if count},
            )
            run = Run(engine, asked.items(split, limit, seed=seed), config, out, settings.tenant, told)
            finished = go(run, json_output, timed)
    if finished.refused:
        raise typer.Exit(ExitCode.GATE)


def _config(task: Task, names: Sequence[str], silent: Sequence[str], new_tokens: int | None) -> RunConfig:
    from kvquilt.evaluation.run.arms import AGAIN
    from kvquilt.evaluation.run.config import RunConfig

    return RunConfig(
        methods=tuple(dict.fromkeys((*names, AGAIN))),  # no table without the noise floor
        metric=task.metric,
        new_tokens=new_tokens or task.answer_limit,
        silent=tuple(silent),
    )
