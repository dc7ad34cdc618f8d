"""`kvquilt keys`: the file with the API keys of a server. Needs no model; a running server takes changes at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvquilt.cli.common import Json, echo_json, echo_table, warn
from kvquilt.errors import InputError
from kvquilt.identity import PUBLIC

if TYPE_CHECKING:
    from kvquilt.server.keys import Role

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="API keys of `kvquilt serve`, in a file.")
File = Annotated[Path, typer.Option("--file", metavar="FILE", help="The key file; only its owner may read it.")]
Tenant = Annotated[str, typer.Argument(metavar="[TENANT]", help="Whose documents the key opens.", show_default=False)]


@app.command()
def add(
    file: File,
    tenant: Tenant = "",
    public: Annotated[bool, typer.Option("--public", help="A publisher's: its documents are for all tenants.")] = False,
    operator: Annotated[bool, typer.Option("--operator", help="It opens /metrics and nothing else.")] = False,
    json_output: Json = False,
) -> None:
    """Make a key for TENANT and print it, once: the file holds only its digest. Makes the file if there is none."""
    from kvquilt.server.keys import KeyFile, alone

    role = _role(tenant, public, operator)
    with alone(file):
        before = KeyFile.read(file) if file.exists() else KeyFile()
        after, key, secret = before.added(tenant, role)
        after.write(file)
    if json_output:
        echo_json({"id": key.id, "tenant": key.tenant, "role": key.role, "key": secret})
        return
    typer.echo(secret)
    warn(f"key {key.id} of {key.tenant if role == 'tenant' else f'a {role}'}; it is shown this once")


@app.command("list")
def listed(file: File, json_output: Json = False) -> None:
    """Name the keys of the file; what they are, nobody can tell from it."""
    from kvquilt.server.keys import KeyFile

    held = KeyFile.read(file)
    if json_output:
        echo_json(
            [
                {
                    "id": key.id, "tenant": key.tenant, "role": key.role, "created": key.created,
                    "quota_bytes": held.quotas.get(key.tenant),
                }
                for key in held.keys
            ]
        )  # fmt: skip
        return
    lines = []
    for key in held.keys:
        quota = held.quotas.get(key.tenant)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created))
        lines.append((key.id, key.tenant, key.role.value, when, "" if quota is None else f"{quota >> 20} MiB"))
    echo_table(("id", "tenant", "role", "created", "quota"), lines)


@app.command()
def revoke(
    file: File, id: Annotated[str, typer.Argument(metavar="ID", help="As `kvquilt keys list` shows it.")]
) -> None:
    """Remove a key. A running server refuses it from the next request on."""
    from kvquilt.server.keys import KeyFile, alone

    with alone(file):
        KeyFile.read(file).without(id).write(file)


@app.command()
def quota(
    file: File,
    tenant: Tenant = "",
    mib: Annotated[
        int | None, typer.Option("--mib", min=0, metavar="MIB", help="Without it, what the server gives by default.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Of the public documents.")] = False,
) -> None:
    """Say how many MiB of compiled segments TENANT may keep, where `kvquilt serve` has --tenant-quota-mib."""
    from kvquilt.server.keys import KeyFile, alone

    _role(tenant, public, operator=False)
    with alone(file):
        held = KeyFile.read(file)
        held.granting(PUBLIC if public else tenant, None if mib is None else mib << 20).write(file)


def _role(tenant: str, public: bool, operator: bool) -> Role:
    from kvquilt.server.keys import Role

    if bool(tenant) + public + operator != 1:
        raise InputError("tenant", "name a tenant, or say that it is none: --public, or --operator for a key")
    return Role.PUBLISHER if public else Role.OPERATOR if operator else Role.TENANT
