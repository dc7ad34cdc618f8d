"""`kvquilt writers`: what was trained, and taking it over to another dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvquilt.cli.common import Device, Dtype, Json, echo_json, settings_of, warn
from kvquilt.cli.work import quiet_libraries
from kvquilt.errors import InputError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Trained writers in their folders.")


@app.callback()
def group() -> None:
    """Trained writers in their folders."""


@app.command()
def rebind(
    context: typer.Context,
    writer: Annotated[Path, typer.Argument(metavar="WRITER", help="Folder of a trained writer or tuned reader.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the copy goes; WRITER stays as it is.")],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="By default the model of the settings.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    json_output: Json = False,
) -> None:
    """Copy WRITER for the same MODEL in another --dtype: trained in bfloat16 on a GPU, say, to be served in float32.

    MODEL is loaded in both dtypes, one after the other; if in the writer's own it is not the model that WRITER was
    trained for, nothing is written. What was measured of WRITER does not hold for the copy: measure it again.
    """
    settings, _ = settings_of(context, model=model, dtype=dtype, device=device)
    quiet_libraries()
    from kvquilt.model.load import load_model
    from kvquilt.writers.artefact import read_manifest
    from kvquilt.writers.folder import MANIFEST
    from kvquilt.writers.manifest import check_base
    from kvquilt.writers.rebinding import load_artefact, rebound

    trained, about = load_artefact(writer), read_manifest(writer)
    if (out / MANIFEST).exists():
        raise InputError("out", "holds a writer already", str(out))
    base, was = trained.base, trained.base.dtype
    check_base(
        f"{writer}", base, trained.base_name, load_model(settings.model, was, settings.device, settings=settings)
    )
    loaded = load_model(settings.model, settings.dtype, settings.device, settings=settings)
    if loaded.fingerprint == base:
        raise InputError("dtype", "name another than the writer's own", was)
    digest = rebound(trained, loaded.fingerprint).save(
        out, about["recipe"] | {"rebound_from": {"digest": about["digest"], "dtype": was}}
    )
    now = loaded.fingerprint.dtype
    warn(f"nothing is measured of it in {now} yet: `kvquilt doctor --writer` or `kvquilt eval --writer` do that")
    if json_output:
        echo_json({"kind": about["kind"], "digest": digest, "dtype": now, "from": about["digest"], "folder": str(out)})
    else:
        typer.echo(f"{out}: {about['kind']} {digest[:12]} for {loaded.name} in {now}")
