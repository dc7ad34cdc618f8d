"""`kvquilt demo`: what reuse does, in a minute, on texts that every Python carries."""

from __future__ import annotations

import typer

from kvquilt.cli.common import Device, Dtype, Json, ModelFlag, Threads, echo_json, settings_of
from kvquilt.cli.work import quiet_libraries


def demo(
    context: typer.Context,
    model: ModelFlag = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Compile help topics of the Python standard library and ask about them, in several orders."""
    settings, _ = settings_of(context, model=model, dtype=dtype, device=device, threads=threads)
    quiet_libraries()
    from kvquilt.demo import run_demo

    result = run_demo(settings, echo=None if json_output else typer.echo)
    if json_output:
        echo_json(result)
