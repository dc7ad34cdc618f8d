"""`kvquilt store`: look at, check and empty the place of compiled segments. Needs no model."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kvquilt.cli.common import ExitCode, Json, Tenant, echo_json, echo_table, settings_of, size, warn
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.identity import SegmentKey
    from kvquilt.store import Store

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The place where compiled segments are kept.")


def _open(context: typer.Context, tenant: str | None = None) -> Store:
    from kvquilt.store import Store

    settings, _ = settings_of(context, tenant=tenant)
    return Store.open(settings.store_dir, settings.memory_bytes, settings.disk_bytes, settings.remote_place)


def _namespace(tenant: str | None) -> str | None:
    from kvquilt.identity import namespace

    return None if tenant is None else namespace(tenant)


@app.command()
def ls(context: typer.Context, tenant: Tenant = None, json_output: Json = False) -> None:
    """List the segments of all tenants, or of one: key, tokens, bytes, uses, last use."""
    with _open(context) as store:
        rows = store.ls(_namespace(tenant))
    if json_output:
        echo_json([{**dataclasses.asdict(row), "key": str(row.key)} for row in rows])
        return
    lines = [(str(r.key), _known(r.tokens, str), size(r.bytes), str(r.frequency), _when(r.last_use)) for r in rows]
    echo_table(("key", "tokens", "size", "uses", "last use"), lines)


@app.command()
def stats(context: typer.Context, json_output: Json = False) -> None:
    """Segments, bytes and budget of each tier. The memory tier belongs to a process, so here it is empty.

    A remote tier is asked whether it answers; what it holds is counted by `store verify`.
    """
    with _open(context) as store:
        answers = store.remote is None or store.remote.answers()
        tiers = store.stats()
    if json_output:
        told = {name: dataclasses.asdict(tier) for name, tier in tiers.items()}
        if store.remote is not None:
            told[store.remote.name] |= {"place": store.remote.place, "answers": answers}
        echo_json(told)
        return
    lines = [
        (
            name,
            _known(tier.segments, str),
            _known(tier.bytes, size),
            "none" if tier.budget is None else size(tier.budget),
        )
        for name, tier in tiers.items()
    ]
    echo_table(("tier", "segments", "size", "budget"), lines)
    if store.remote is not None:
        typer.echo(f"{store.remote.place} {'answers' if answers else 'does not answer'}")


@app.command()
def verify(
    context: typer.Context,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged; it is compiled again.")] = False,
    json_output: Json = False,
) -> None:
    """Read every file and check every bit; exit code 4 if something is damaged and was not removed.

    So is all that a remote tier has; exit code 4 too if it does not answer.
    """
    with _open(context) as store:
        report = store.verify(repair=repair)
        store.check_integrity()
    damaged = [{"key": str(key), "reason": reason.value} for key, reason in report.damaged]
    if json_output:
        unread = list(report.unread)
        echo_json({"checked": report.checked, "damaged": damaged, "removed": report.removed, "unread": unread})
    else:
        for each in damaged:
            typer.echo(f"{each['key']}: {each['reason']}")
        typer.echo(f"{report.checked} checked, {len(damaged)} damaged, {report.removed} removed")
    for name in report.unread:
        warn(f"the {name} tier does not answer and was not read")
    if report.removed < len(damaged) or report.unread:
        raise typer.Exit(ExitCode.STORE)


@app.command()
def gc(context: typer.Context, json_output: Json = False) -> None:
    """Remove abandoned temporary files, bring index and files together, shrink to the budget."""
    with _open(context) as store:
        report = dataclasses.asdict(store.gc())
    if json_output:
        echo_json(report)
    else:
        typer.echo(", ".join(f"{name} {count}" for name, count in report.items()))


@app.command()
def rm(
    context: typer.Context,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="As `store ls` prints them.")] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Everything of this tenant.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything of every tenant.")] = False,
    json_output: Json = False,
) -> None:
    """Remove segments: some by key (or an unmistakable beginning of its digest), one tenant's, or all."""
    if bool(keys) + (tenant is not None) + everything != 1:
        raise InputError("rm", "give exactly one of KEY, --tenant NAME, --all")
    with _open(context) as store:
        if keys:
            removed = sum(store.rm(key=each) for each in [_find(store, key) for key in keys])
        else:
            removed = store.rm(namespace=_namespace(tenant), everything=everything)
        failures = {name: dict(tier.failures) for name, tier in store.stats().items() if tier.failures}
    if json_output:
        echo_json({"removed": removed})
    else:
        typer.echo(f"{removed} removed")
    for name, reasons in failures.items():
        told = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
        warn(f"error: the {name} tier may still have what could not be removed there: {told}")
    if failures:
        raise typer.Exit(ExitCode.STORE)


def _find(store: Store, written: str) -> SegmentKey:
    """The one stored key that equals `written` or whose digest begins with it, in the namespace written before it."""
    namespace, _, digest = written.rpartition("/")
    if not digest:
        raise InputError("KEY", "must be a key, or the beginning of its digest", written)
    rows = store.ls(namespace or None)
    found = [row.key for row in rows if row.key.digest.startswith(digest)]
    exact = [key for key in found if str(key) == written]
    if len(exact or found) != 1:
        rule = "several segments begin so" if found else "no such segment; see `kvquilt store ls`"
        raise InputError("KEY", rule, written)
    return (exact or found)[0]


def _known(count: int | None, told: Callable[[int], str]) -> str:
    return "unknown" if count is None else told(count)


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "minutes") if seconds else "-"
