"""`kvquilt study repair-budget`: what reuse damages, what mends it, and where a small budget is best spent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from kvquilt.cli.lists import names_in, numbers_in
from kvquilt.cli.measuring import (
    NewTokensFlag,
    OutFlag,
    SeedFlag,
    about,
    arms_of,
    check_free,
    check_methods,
    task_of,
    told_by_option,
    told_within,
)
from kvquilt.cli.watching import watching
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.dense import Encoder
    from kvquilt.engine import Engine
    from kvquilt.evaluation.studies.repair_budget import StudyProgress
    from kvquilt.evaluation.studies.repair_budget_settings import RepairBudget

_TASKS = ("biography",)
_OPTIONS = {
    "parts": "--part", "kinds": "--questions", "structures": "--company", "distractors": "--distractors",
    "places": "--places", "budget": "--budget", "methods": "--arms", "task": "--task",
    "new_tokens": "--new-tokens", "folder": "--out", "dense": "--dense",
}  # fmt: skip


def repair_budget(
    context: typer.Context,
    out: OutFlag,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK",
            help="biography, api_docs:source=invented, squad:PATH, jsonl:PATH, ...; repeatable. By default biography.",
        ),
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="A,B", help="structure, attribution, budget, context, retrieval.")
    ] = "structure,attribution,budget,context,retrieval",
    model: ModelFlag = None,
    budget: Annotated[str, typer.Option(metavar="BUDGET", help="What every repair may spend.")] = "5%",
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Items of each task.")] = 6,
    tuning_limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Items of its tuning split, by which a token selector is chosen.")
    ] = 4,
    cell_limit: Annotated[int, typer.Option(min=1, metavar="N", help="Items of each cell of structure.")] = 2,
    questions: Annotated[
        str, typer.Option(metavar="A,B", help="Of structure: biography, api_docs (an invented library) or both.")
    ] = "biography",
    company: Annotated[
        str, typer.Option(metavar="A,B", help="Of structure: alone, other kind, same kind, near-duplicates.")
    ] = "I0,I1,I2,I3",
    distractors: Annotated[str, typer.Option(metavar="A,B", help="Of structure: documents of company.")] = "1,7",
    places: Annotated[
        str, typer.Option(metavar="A,B", help="Of structure: where the target stands: first, middle, last.")
    ] = "first,last",
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Draws of random rows, and of orders of attribution.")
    ] = 2,
    arms: Annotated[
        str | None, typer.Option(metavar="A,B", help="More arms of the part budget, as in kvquilt eval --methods.")
    ] = None,
    dense: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A dense retriever: wordllama (kvquilt[dense]), an encoder's folder or id."),
    ] = None,
    seed: SeedFlag = 0,
    new_tokens: NewTokensFlag = None,
    helper_model: HelperFlag = None,
    writer: WriterFlag = None,
    tenant: Tenant = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """What reuse damages, what mends it, and where 5% of the work is best spent.

    structure: damage by what stands beside the target. attribution: distractors mended one by one. budget: the
    retriever's document, other documents, orders and tokens at one budget; the token selector is chosen on the tuning
    split. context: the target reused, replaced, computed again, moved. retrieval: who finds it. Every setting is a
    folder that `kvquilt report` reads. In DIR: repair-budget.json and .md, pictures. Ctrl-C loses nothing: the same
    command goes on. Exit code 6: an arm failed a control.

    How long it takes: settings and prompts are counted before the first is read, and from the second on stderr says
    how long they will take. The defaults read some hundreds of prompts, an impression; a claim needs far more.
    """
    settings, _ = settings_of(
        context, model=model, helper_model=helper_model, tenant=tenant, dtype=dtype, device=device, threads=threads
    )
    from kvquilt.cli.work import open_engine, quiet_libraries
    from kvquilt.dense import find_encoder
    from kvquilt.evaluation.studies.repair_budget_settings import RepairBudget

    more, writers = arms_of("--arms", arms or "", writer or ())
    asked = {written: task_of(written) for written in task or _TASKS}
    system = next(iter(asked.values())).system
    with told_by_option(**_OPTIONS):
        plan = RepairBudget(
            tasks=tuple(task or _TASKS),
            parts=names_in("--part", part),
            kinds=names_in("--questions", questions),
            structures=names_in("--company", company),  # type: ignore[arg-type]  # checked there
            distractors=numbers_in("--distractors", distractors, int),
            places=names_in("--places", places),  # type: ignore[arg-type]
            budget=budget,
            cell_items=cell_limit,
            items=limit,
            tuning_items=tuning_limit,
            seeds=seeds,
            more=tuple(more),
            seed=seed,
            new_tokens=new_tokens,
        )
        for each in asked.values():
            with told_within("--task"):
                each.items("evaluation", 1, seed=seed)
                if "budget" in plan.parts:
                    each.items("tuning", 1, seed=seed)
        check_methods(plan.more, writers, settings)
        check_free(out)
        quiet_libraries()
        encoder = None if dense is None else find_encoder(dense)
        with open_engine(settings, writers, system) as engine:
            _go(plan, engine, out, settings.tenant, encoder, writers)
    found = _write(out)
    if json_output:
        echo_json(found)
    else:
        _show(found, out)
    if found["refused"]:
        raise typer.Exit(ExitCode.GATE)


def _go(
    plan: RepairBudget, engine: Engine, out: Path, tenant: str | None, encoder: Encoder | None, writers: list[str]
) -> None:
    from kvquilt.bench import portable
    from kvquilt.engine import Engine
    from kvquilt.evaluation.studies.repair_budget import RepairBudgetStudy

    def asking(system: str) -> Engine:
        reader = engine.reader
        return Engine(
            engine.model, engine.store, engine.settings, system=system, helper=reader.helper, writers=reader.trained
        )

    told = about(engine, writers, limit=plan.items, seed=plan.seed)
    study = RepairBudgetStudy(asking, plan, out, encoder, tenant, told, portable)
    try:
        with watching("study", "prompts") as watch:

            def each(now: StudyProgress) -> None:
                if now.begins:
                    watch.stands(now.done, now.total, f"{now.number} of {now.settings} settings: {now.setting}")
                else:
                    watch(now.done, now.total, now.setting)

            study.go(each)
    except KeyboardInterrupt:
        warn(f"stopped; what is finished is kept in {out}. The same command goes on from there.")
        raise


def _write(out: Path) -> dict[str, Any]:
    from kvquilt.evaluation.studies.repair_budget_figures import figures
    from kvquilt.evaluation.studies.repair_budget_plot import pictures
    from kvquilt.evaluation.studies.repair_budget_text import markdown
    from kvquilt.files import write_atomically, writing

    found = figures(out)
    with writing(out):
        write_atomically(out / "repair-budget.json", (json.dumps(found, indent=1) + "\n").encode())
        write_atomically(out / "repair-budget.md", markdown(found).encode())
        try:
            for name, png in pictures(found).items():
                write_atomically(out / name, png)
        except InputError as error:
            warn(str(error))
    return found


def _show(found: dict[str, Any], out: Path) -> None:
    from kvquilt.evaluation.studies.repair_budget_text import remarks, study_tables

    for table in study_tables(found):
        typer.echo(table.title)
        echo_table(table.head, table.rows)
        for note in table.notes:
            typer.echo(note)
        typer.echo()
    for remark in remarks(found):
        typer.echo(remark)
    typer.echo(f"The study is in {out}; `kvquilt report FOLDER` makes a page of a run below it, see docs/studies.md.")
