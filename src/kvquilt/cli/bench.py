"""`kvquilt bench`: timings whose ratios belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvquilt.cli.common import Device, Dtype, ModelFlag, Threads, echo_table, settings_of
from kvquilt.cli.work import quiet_libraries

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Timings whose ratios belong together.")


@app.callback()
def group() -> None:
    """Timings whose ratios belong together."""


@app.command()
def ttft(
    context: typer.Context,
    model: ModelFlag = None,
    context_tokens: Annotated[int, typer.Option(min=16, metavar="N", help="Tokens of all documents.")] = 4096,
    documents: Annotated[int, typer.Option(min=1, metavar="N", help="How many documents they make.")] = 16,
    question_tokens: Annotated[int, typer.Option(min=1, metavar="N")] = 32,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Medians are taken over so many runs.")] = 5,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write JSON there; - is stdout.")] = None,
) -> None:
    """Time to first token: full prefill, exact prefix, reuse from memory and disk, repair; decoding and compiling."""
    settings, _ = settings_of(context, model=model, dtype=dtype, device=device, threads=threads)
    quiet_libraries()
    from kvquilt.bench import run_ttft

    result = run_ttft(
        settings=settings, context_tokens=context_tokens, documents=documents, question_tokens=question_tokens,
        repeats=repeats,
    )  # fmt: skip
    text = json.dumps(result, indent=2) + "\n"
    if out is not None and str(out) == "-":
        typer.echo(text, nl=False)
        return
    echo_table(("figure", "value"), [(k, f"{v:.2f}" if isinstance(v, float) else str(v)) for k, v in result.items()])
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
