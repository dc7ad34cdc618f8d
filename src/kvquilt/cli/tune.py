"""`kvquilt tune`: which method keeps the answers on these documents, and at what budget?"""

from __future__ import annotations

import json
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
    warn,
)
from kvquilt.cli.work import check_helper, check_path, check_writers, open_engine, passages_in
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.config import Settings
    from kvquilt.tuning_report import TuneReport


def tune(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="By default the model of the settings.")] = None,
    docs: Annotated[
        Path | None,
        typer.Option("--docs", metavar="DIR", help="Folder (or one file) with documents; needed but for --forget."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='JSONL: {"question": ..., "answers": [...]}; by default the model asks.'),
    ] = None,
    target: Annotated[float, typer.Option(metavar="SHARE", help="Quality to keep, of full prefill's.")] = 0.98,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B", help="Candidates, such as none,epic:k=16; by default seventy and more.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=6, metavar="N", help="Half of them choose, half report.")] = 24,
    seconds: Annotated[float, typer.Option(min=0.0, metavar="S", help="Stop comparing after so long.")] = 1800.0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where tune.json and tune.png go.")] = Path("kvquilt-tune"),
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Measure nothing: remove the earlier choice. `auto` goes by the gate again."),
    ] = False,
    helper_model: HelperFlag = None,
    writer: WriterFlag = None,
    tenant: Tenant = None,
    passage_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest passage in tokens.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Find the cheapest method that keeps the answers of full prefill on your documents; `auto` then uses it.

    Candidates are compared on half of the prompts; the choice is measured on the other half, whose documents and
    questions it has not seen. Exit code 6: nothing reached the target there, so nothing was chosen. With a trained
    writer its method and others over what it compiled are candidates, too; the choice holds while the same writers
    are given.
    """
    settings, _ = settings_of(
        context, model=model, helper_model=helper_model, tenant=tenant, passage_tokens=passage_tokens, dtype=dtype,
        device=device, threads=threads,
    )  # fmt: skip
    if (docs is None) != forget:
        raise InputError("docs", "give exactly one of --docs DIR, --forget")
    if docs is None:
        _forget(settings, writer or (), json_output)
        return
    check_path(docs)
    from kvquilt.tuning_samples import read_questions

    names = None if methods is None else method_names(methods)
    check_helper(names or (), settings)  # and that all are known, before a model is loaded for nothing
    check_writers(names or (), writer or ())
    asked = read_questions(questions) if questions is not None else []
    with open_engine(settings, writer or ()) as engine:
        documents = passages_in(docs, settings, engine.model.tokenizer).documents
        with progress("measuring") as advance:
            report = engine.tune(
                documents, asked, target=target, methods=names, prompts=prompts, seconds=seconds,
                tenant=settings.tenant, progress=advance,
            )  # fmt: skip
    _write(report, out)
    if json_output:
        echo_json({**report.as_dict(), "accepted": report.accepted, "out": str(out)})
    else:
        _show(report, out)
    if not report.accepted:
        raise typer.Exit(ExitCode.GATE)


def _forget(settings: Settings, writer: Sequence[str], json_output: bool) -> None:
    """Remove what is stored for this model, tenant and set of trained writers, and say what it was."""
    check_writers((), writer)
    with open_engine(settings, writer) as engine:
        earlier = engine.tuned(settings.tenant)
        forgotten = engine.forget_tuning(settings.tenant)
    chosen = earlier.chosen if earlier is not None and earlier.accepted else None
    if json_output:
        echo_json({"forgotten": forgotten, "chosen": chosen})
    elif not forgotten:
        typer.echo("Nothing was tuned for this model, tenant and set of trained writers.")
    else:
        typer.echo(f"Forgotten: {chosen or 'a tuning without a choice'}. `auto` goes by the gate.")


def _write(report: TuneReport, out: Path) -> None:
    """The curve as JSON, and as a picture where matplotlib is there."""
    from kvquilt.files import write_atomically
    from kvquilt.tuning_plot import plot

    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "tune.json", json.dumps(report.as_dict(), indent=1).encode())
        write_atomically(out / "tune.png", plot(report))
    except InputError as error:
        warn(str(error))
    except OSError as error:
        warn(f"the curve could not be written to {out}: {error.strerror}")


def _show(report: TuneReport, out: Path) -> None:
    """The curve as a table, cheapest first, and what came of it."""
    rows = [
        (
            t.method,
            f"{t.charged:.1%}",
            f"{t.quality:.3f} ± {t.error:.3f}",
            f"{t.mean_kl:.3f}",
            f"{t.top1:.2f}",
            f"{t.first_token:.1f}x",
        )
        for t in report.trials
    ]
    echo_table(("method", "charged", report.judged_by, "mean KL", "top-1", "faster"), rows)
    for name, reason in report.refused.items():
        typer.echo(f"not tried further: {name}: {reason}")
    typer.echo(f"\nThe curve is in {out}.")
    if report.chosen is None:
        typer.echo(f"No method reached {report.target:g}; `auto` goes by the gate.")
    elif report.accepted:
        typer.echo(f"`auto` uses {report.chosen}: on prompts it was not chosen on, {report.summary}.")
    else:
        typer.echo(
            f"{report.chosen} was the cheapest to reach {report.target:g}, but not on prompts it was not chosen on: "
            f"{report.summary}. Nothing is stored for `auto`; try more prompts, or another target."
        )
