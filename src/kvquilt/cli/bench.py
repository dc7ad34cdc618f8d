"""`kvquilt bench`: timings whose ratios belong together."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvquilt.cli.common import Dtype, ModelFlag, Threads, echo_table, settings_of, warn
from kvquilt.cli.work import quiet_libraries
from kvquilt.errors import InputError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Timings whose ratios belong together.")


@app.callback()
def group() -> None:
    """Timings whose ratios belong together."""


@app.command()
def ttft(
    context: typer.Context,
    model: ModelFlag = None,
    context_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of all documents.")] = 4096,
    documents: Annotated[int, typer.Option(metavar="N", help="How many documents they make.")] = 16,
    question_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of the question, about.")] = 32,
    rounds: Annotated[int, typer.Option(metavar="N", help="Medians are taken over so many rounds.")] = 5,
    dtype: Dtype = None,
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write JSON there; - is stdout.")] = None,
) -> None:
    """Time to first token: full prefill, exact prefix, reuse from memory and disk, repair; decoding and compiling.

    Only the ratios mean something elsewhere: all arms take turns in one run on one machine.
    """
    settings, _ = settings_of(context, model=model, dtype=dtype, threads=threads)
    to_file = out is not None and str(out) != "-"
    if out is not None and to_file:
        check_output(out)
    quiet_libraries()
    from kvquilt.bench import TtftPlan, run_ttft

    plan = TtftPlan(
        model=settings.model, context_tokens=context_tokens, documents=documents, question_tokens=question_tokens,
        dtype=settings.dtype, threads=settings.threads, rounds=rounds,
    )  # fmt: skip
    result = run_ttft(plan, settings, progress=warn if sys.stderr.isatty() else None)
    text = json.dumps(result, indent=2) + "\n"
    if out is not None and not to_file:
        typer.echo(text, nl=False)
        return
    figures = {name: value for name, value in result.items() if isinstance(value, float | int)}
    echo_table(("figure", "value"), [(name, f"{value:g}") for name, value in (figures | result["ratios"]).items()])
    if out is not None:
        out.write_text(text, encoding="utf-8")


def check_output(path: Path) -> None:
    """Make the folder of `path` and see that it can be written, before minutes of measuring.

    Raises:
        InputError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("--json", f"its folder cannot be made: {error.strerror}", str(path)) from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError("--json", "must be a file that can be written, or -", str(path))
