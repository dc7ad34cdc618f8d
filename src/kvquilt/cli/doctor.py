"""`kvquilt doctor`: is reuse right on this model, and does it keep the answers on these documents?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvquilt.cli.common import (
    Device,
    Dtype,
    ExitCode,
    HelperFlag,
    Json,
    Tenant,
    Threads,
    WriterFlag,
    echo_json,
    echo_table,
    method_names,
    progress,
    settings_of,
)
from kvquilt.cli.work import check_helper, check_path, check_writers, open_engine, passages_in
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.gate_report import DoctorReport
    from kvquilt.tuning_report import TuneReport


def doctor(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="By default the model of the settings.")] = None,
    docs: Annotated[Path | None, typer.Option("--docs", metavar="DIR", help="Your documents to sample from.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Which to measure, such as none,epic:k=16; by default what auto tries."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, metavar="S", help="Stop measuring after so long.")] = 600.0,
    prompts: Annotated[int, typer.Option(min=3, metavar="N", help="Sample prompts, at most.")] = 12,
    tenant: Tenant = None,
    passage_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest passage in tokens.")] = None,
    helper_model: HelperFlag = None,
    writer: WriterFlag = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Check that reuse is computed rightly on MODEL and how well each method keeps the answers of full prefill.

    The verdicts are stored beside earlier ones on other methods, and obeyed by `ask` with method or policy auto. Exit
    code 6: a check failed, or none of the methods measured passed. A verdict on a trained writer's method holds for
    that very writer.
    """
    settings, _ = settings_of(
        context, model=model, tenant=tenant, passage_tokens=passage_tokens, helper_model=helper_model,
        dtype=dtype, device=device, threads=threads,
    )  # fmt: skip
    if docs is not None:
        check_path(docs)
    given = _named(methods)
    check_helper(given or (), settings)
    check_writers(given or (), writer or ())
    with open_engine(settings, writer or ()) as engine:
        order = engine.reader.auto_order
        named = order if given is None else given
        documents = None if docs is None else passages_in(docs, settings, engine.model.tokenizer).documents
        with progress("measuring") as advance:
            report = engine.doctor(
                documents, settings.tenant, seconds=seconds, prompts=prompts, methods=named, progress=advance
            )
        tuned = engine.tuned(settings.tenant)
    if json_output:
        echo_json(report.as_dict())
    else:
        show_report(report, tuned, order)
    if not report.healthy or not any(verdict.passed for verdict in report.verdicts if verdict.method in named):
        raise typer.Exit(ExitCode.GATE)


def show_report(report: DoctorReport, tuned: TuneReport | None, order: Sequence[str] = ()) -> None:
    """Checks and verdicts as two tables on stdout, and what `auto` makes of them, or of what `tune` found.

    Args:
        order: what `auto` tries, where there are trained writers.
    """
    from kvquilt.policy import resolve
    from kvquilt.repair.presets import AUTO_ORDER

    mark = {True: "ok", False: "FAILED"}
    echo_table(
        ("check", "", "value", "limit"),
        [(check.name, mark[check.passed], f"{check.value:.2g}", f"{check.limit:.2g}") for check in report.checks],
    )
    typer.echo()
    rows = [
        (
            v.method + (f" [{v.trained.split()[1][:12]}]" if v.trained else ""),
            mark[v.passed],
            f"{v.mean_kl:.3f}",
            f"{v.p95_kl:.3f}",
            f"{v.top1:.2f}",
            f"{v.charged:.1%}",
            str(v.prompts),
            v.reason,
        )
        for v in report.verdicts
    ]
    echo_table(("method", "", "mean KL", "p95 KL", "top-1", "charged", "prompts", "why not"), rows)
    chosen, fallback = resolve("auto", report, report.max_kl, report.min_top1, order or AUTO_ORDER)
    if tuned is not None and tuned.accepted and report.healthy:
        typer.echo(f"\n`auto` uses {tuned.chosen}, which `tune` chose for {tuned.target:g}: {tuned.summary}.")
    elif chosen.reuses:
        typer.echo(f"\n`auto` uses {chosen.name}." if fallback is None else f"\n`auto`: {fallback.detail}.")
    else:
        typer.echo(
            "\nNothing that `auto` tries passes, so it uses full prefill. Ways out: name a method (--method "
            "retrieved-document) and accept what it changes, a stronger model, or other limits (gate_max_kl, "
            "gate_min_top1)."
        )


def _named(written: str | None) -> tuple[str, ...] | None:
    """The methods to measure; checked before a model is loaded for nothing."""
    from kvquilt.repair.presets import find_method

    if written is None:
        return None
    names = tuple(method_names(written))
    if not names:
        raise InputError("methods", "name at least one", written)
    for name in names:
        find_method(name)
    return names
