"""`kvquilt compile`: every passage of a folder, once, into the store."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from kvquilt.cli.common import (
    Device,
    Dtype,
    ExitCode,
    Json,
    ModelFlag,
    Tenant,
    Threads,
    WriterFlag,
    echo_json,
    progress,
    settings_of,
    size,
    warn,
)
from kvquilt.cli.doctor import show_report
from kvquilt.cli.work import check_path, check_writers, open_engine, passages_in


def compile_documents(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder (or one file) with documents.")],
    method: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="Encode documents as it wants them, such as fusionrag."),
    ] = None,
    model: ModelFlag = None,
    writer: WriterFlag = None,
    tenant: Tenant = None,
    passage_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest passage in tokens.")] = None,
    gate: Annotated[bool, typer.Option(help="End with a short check of what reuse does to answers.")] = True,
    gate_seconds: Annotated[float | None, typer.Option(metavar="S", help="Time for that check.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Compile the documents of DIR into the store; what is stored already is not computed again.

    Reads .txt .md .rst .html .py, and .pdf with the extra `pdf`. Files that are not text are skipped and counted.
    Ctrl-C keeps what is finished; the same command goes on from there. With a trained writer they are compiled by it
    (the first, of several, unless METHOD names another), and the closing check measures its method, too.
    """
    settings, _ = settings_of(
        context, model=model, tenant=tenant, passage_tokens=passage_tokens, gate_seconds=gate_seconds,
        dtype=dtype, device=device, threads=threads,
    )  # fmt: skip
    check_path(folder)
    if method is not None:
        from kvquilt.repair.presets import find_method

        find_method(method)  # before a model is loaded for nothing
    check_writers([method] if method is not None else [], writer or ())
    with open_engine(settings, writer or ()) as engine:
        found = passages_in(folder, settings, engine.model.tokenizer)
        with progress("compiling") as advance:
            report = engine.compile(
                found.documents, tenant=settings.tenant, gate=gate, progress=advance, method=method or ""
            )
        stored, tuned = engine.store.stats()["disk"], engine.tuned(settings.tenant)
        order = engine.reader.auto_order
    skipped = [{"path": each.path, "reason": each.reason} for each in found.skipped]
    if json_output:
        read = {"files": len(found.files), "skipped": skipped, "duplicates": found.duplicates}
        place = {"store": str(settings.store_dir), "failures": stored.failures}
        echo_json({**dataclasses.asdict(report), **read, **place})
    else:
        typer.echo(f"read      {len(found.files)} files, {len(skipped)} skipped, {found.duplicates} repeated passages")
        typer.echo(f"compiled  {report.compiled} of {report.documents} passages ({report.tokens} tokens), ", nl=False)
        typer.echo(f"{report.stored_before} were stored before, in {report.seconds:.1f} s")
        typer.echo(f"store     {settings.store_dir}: {stored.segments} segments, {size(stored.bytes or 0)}")
        if report.gate is not None:
            typer.echo()
            show_report(report.gate, tuned, order)
    if stored.failures:
        reasons = ", ".join(f"{reason} {count}" for reason, count in stored.failures.items())
        warn(f"error: segments could not be stored in {settings.store_dir}: {reasons}")
        raise typer.Exit(ExitCode.STORE)
