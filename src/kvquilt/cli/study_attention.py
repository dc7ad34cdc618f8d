"""`kvquilt study attention`: what reuse does to attention."""

from __future__ import annotations

import json
from pathlib import Path
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
    echo_json,
    echo_table,
    settings_of,
    warn,
)
from kvquilt.cli.measuring import (
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
from kvquilt.cli.watching import TRYING, watching
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.evaluation.studies.attention_summary import AttentionSummary


def attention(
    context: typer.Context,
    task: Annotated[
        str, typer.Option(metavar="TASK", help="biography, niah:kind=multikey, squad:PATH, jsonl:PATH, ...")
    ],
    methods: Annotated[str, typer.Option(metavar="A,B", help="Methods; full and none are always among them.")],
    out: OutFlag,
    model: ModelFlag = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Items.")] = 20,
    split: SplitFlag = "evaluation",
    seed: SeedFlag = 0,
    helper_model: HelperFlag = None,
    writer: WriterFlag = None,
    tenant: Tenant = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """What reuse does to attention: how far each document token's weight is from full prefill's, by layer and head.

    Looked at from the rows that answer: the prompt's last token and the accepted answer's, forced. Ratios are to pure
    reuse; below 1 is nearer to full prefill. They explain; they do not rank methods. In DIR: attention.json, pictures,
    a line for every item and arm. Ctrl-C loses nothing: the same command goes on. Exit code 6: an arm failed a control.
    """
    settings, _ = settings_of(
        context, model=model, helper_model=helper_model, tenant=tenant, dtype=dtype, device=device, threads=threads
    )
    from kvquilt.bench import portable
    from kvquilt.cli.work import open_engine
    from kvquilt.evaluation.studies.attention_run import AttentionRun, find_attention_arms
    from kvquilt.evaluation.studies.attention_summary import summarise_attention

    names, writers = arms_of("--methods", methods, writer or ())
    if not names:
        raise InputError("--methods", "name at least one")
    asked = task_of(task)  # whatever is wrong with it is found before a model is loaded
    with told_by_option(methods="--methods", split="--split", folder="--out"):
        find_attention_arms(names)
        check_methods(names, writers, settings)
        asked.items(split, 1, seed=seed)
        check_free(out)
        with open_engine(settings, writers, asked.system) as engine:
            asked = task_of(task, engine)
            tell_skipped(asked)
            told = about(engine, writers, task=portable(task), split=split, limit=limit, seed=seed)
            items = asked.items(split, limit, seed=seed)
            with watching("looking", "prompts", TRYING) as watch:
                AttentionRun(engine, items, names, out, settings.tenant, told).go(watch)
    summary = summarise_attention(out)
    _write(summary, out)
    if json_output:
        echo_json(summary.as_dict())
    else:
        _show(summary, out)
    if summary.refused:
        raise typer.Exit(ExitCode.GATE)


def _write(summary: AttentionSummary, out: Path) -> None:
    from kvquilt.evaluation.studies.attention_plot import pictures
    from kvquilt.files import write_atomically, writing

    with writing(out):
        write_atomically(out / "attention.json", (json.dumps(summary.as_dict()) + "\n").encode())
        try:
            for name, png in pictures(summary).items():
                write_atomically(out / name, png)
        except InputError as error:
            warn(str(error))


def _show(summary: AttentionSummary, out: Path) -> None:
    head = ("method", "items", "R_front", "R_int", "T_1", "T_2..8", "NRMSE", "cosine", "mass", "seen")
    rows = []
    for arm in summary.arms:
        ratio, first = arm.ratio["raw"], arm.density
        later = [each for each in first[1:] if each == each]
        figures = (
            ratio["front"], ratio["interior"], first[0], sum(later) / len(later) if later else float("nan"),
            arm.nrmse, arm.cosine, arm.mass,
        )  # fmt: skip
        rows.append((arm.method, str(arm.items), *(f"{each:.3g}" for each in figures), f"{arm.seen:.0%}"))
    echo_table(head, rows)
    typer.echo(
        "\nR: difference of a token's weight to full prefill's over that of pure reuse, in a document's first tenth\n"
        "and interior. T: weight of a document's first tokens over that of one in its interior. NRMSE, cosine\n"
        "distance, mass: what is retrieved from a document, against full prefill. seen: tokens that have slots."
    )
    for arm in summary.arms:
        if arm.refused:
            typer.echo(f"{arm.method} could not run on {arm.refused} of the items")
    for name, reason in summary.refused.items():
        typer.echo(f"not measured: {name}: {reason}")
    typer.echo(f"The study is in {out}.")
