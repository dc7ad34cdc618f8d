"""`kvquilt keys`: the file with the API keys of a server. Needs no model; a running server takes changes at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvquilt.cli.common import Json, echo_json, echo_table, warn

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="API keys of `kvquilt serve`, in a file.")
File = Annotated[Path, typer.Option("--file", metavar="FILE", help="The key file; only its owner may read it.")]


@app.command()
def add(
    file: File,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose documents the key opens.")],
    json_output: Json = False,
) -> None:
    """Make a key for TENANT and print it, once: the file holds only its digest. Makes the file if there is none."""
    from kvquilt.server.keys import KeyFile

    before = KeyFile.read(file) if file.exists() else KeyFile()
    after, key, secret = before.added(tenant)
    after.write(file)
    if json_output:
        echo_json({"id": key.id, "tenant": key.tenant, "key": secret})
        return
    typer.echo(secret)
    warn(f"key {key.id} of {key.tenant}; it is shown this once")


@app.command("list")
def listed(file: File, json_output: Json = False) -> None:
    """Name the keys of the file; what they are, nobody can tell from it."""
    from kvquilt.server.keys import KeyFile

    keys = KeyFile.read(file).keys
    if json_output:
        echo_json([{"id": key.id, "tenant": key.tenant, "created": key.created} for key in keys])
        return
    lines = [(key.id, key.tenant, time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created))) for key in keys]
    echo_table(("id", "tenant", "created"), lines)


@app.command()
def revoke(
    file: File, id: Annotated[str, typer.Argument(metavar="ID", help="As `kvquilt keys list` shows it.")]
) -> None:
    """Remove a key. A running server refuses it from the next request on."""
    from kvquilt.server.keys import KeyFile

    KeyFile.read(file).without(id).write(file)
