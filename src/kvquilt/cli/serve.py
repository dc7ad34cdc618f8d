"""`kvquilt serve`: an OpenAI-compatible server over one model and its store."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvquilt.cli.common import (
    BudgetFlag,
    Device,
    Dtype,
    ExitCode,
    HelperFlag,
    MethodFlag,
    Threads,
    WriterFlag,
    settings_of,
    warn,
)
from kvquilt.cli.work import check_helper, check_writers, quiet_libraries
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.config import Settings
    from kvquilt.server.keyring import Keyring
    from kvquilt.server.service import Service
    from kvquilt.server.shares import Shares

Level = Literal["debug", "info", "warning", "error"]


def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="By default the model of the settings.")] = None,
    writer: WriterFlag = None,
    method: MethodFlag = None,
    budget: BudgetFlag = None,
    helper_model: HelperFlag = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Beyond this machine only with --api-keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys and their tenants; see `kvquilt keys`.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call the model; by default the end of MODEL.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message that documents are compiled behind.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Upload the documents of `kvquilt demo`, to try the page with.")
    ] = False,
    streams: Annotated[int, typer.Option(min=1, metavar="N", help="Answers at the same time.")] = 8,
    queue: Annotated[int, typer.Option(min=1, metavar="N", help="Requests that may wait; beyond, 503.")] = 64,
    cache_mib: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="Keys and values of all answers in work.")
    ] = 4096,
    tenant_quota_mib: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="MIB",
            help="Compiled segments that a tenant may keep, unless `kvquilt keys quota` says otherwise.",
        ),
    ] = None,
    tenant_texts_mib: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="Uploaded texts that a tenant may keep.")
    ] = 1024,
    deadline: Annotated[float, typer.Option(min=0.1, metavar="S", help="Longest request, waiting included.")] = 600.0,
    body_mib: Annotated[int, typer.Option(min=1, metavar="MIB", help="Longest body of a request.")] = 16,
    grace: Annotated[float, typer.Option(min=1.0, metavar="S", help="For answers in work when told to stop.")] = 30.0,
    log_level: Annotated[Level, typer.Option(help="A line of JSON on stderr for every request from info on.")] = "info",
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Serve MODEL to clients of OpenAI: chat completions and completions, with documents uploaded or in the prompt.

    Without --api-keys there is one tenant without a name, and only this machine may connect.
    """
    settings, _ = settings_of(
        context, model=model, helper_model=helper_model, method=method, budget=budget, dtype=dtype, device=device,
        threads=threads,
    )  # fmt: skip
    try:
        from kvquilt.server.access import is_loopback
        from kvquilt.server.running import listening, make_server, url
    except ImportError as error:
        raise InputError("serve", f"needs the extra: pip install 'kvquilt[server]' ({error.name} is missing)") from None
    from kvquilt.policy import needs_verdict, written_method
    from kvquilt.server.limits import Limits

    # before a model is loaded for nothing
    limits = Limits(
        streams=streams, queue=queue, cache_bytes=cache_mib << 20, deadline=deadline, body_bytes=body_mib << 20,
        grace=grace, text_bytes=tenant_texts_mib << 20,
    )  # fmt: skip
    asked = written_method(settings.method, None, settings.budget)
    needs_verdict(asked, settings.policy)
    check_helper([asked], settings)
    check_writers([asked], writer or ())
    if demo and api_keys is not None:
        raise InputError("demo", "goes without --api-keys: whose documents would they be?")
    keyring = _keyring(api_keys)
    if keyring is None and not is_loopback(host):
        rule = (
            "others could connect there and nobody would ask who they are; give --api-keys FILE, or a loopback address"
        )
        raise InputError("host", rule, host)
    shares = _shares(keyring, tenant_quota_mib, settings)
    listener = listening(host, port)
    quiet_libraries()
    from kvquilt.engine import SYSTEM, Engine
    from kvquilt.server import logs
    from kvquilt.server.service import Service
    from kvquilt.server.traces import traced

    text = SYSTEM if system is None else system
    # no live caches: a follow-up over HTTP brings its history along
    with Engine.load(settings=settings, writer=writer or (), system=text, conversations=0) as engine:
        called = name or Path(engine.model.name).name
        handler = logs.to_stderr(log_level)
        signal.signal(signal.SIGTERM, _end)
        try:
            service = Service(engine, called, settings.store_dir / "documents", limits, keyring, shares)
            if demo:
                _upload_demo(service)
            warn(f"serving {called} at {url(listener)}/v1, with a page at {url(listener)}/; Ctrl-C stops")
            with traced(called) as told:
                make_server(service, told).run(sockets=[listener])
        finally:
            listener.close()
            logs.detach(handler)


def _upload_demo(service: Service) -> None:
    """The demo's documents for the tenant without a name; what is there under one of their ids stays."""
    from kvquilt.cli.demo import demo_documents
    from kvquilt.server.texts import Uploaded

    new = [each for each in demo_documents() if service.library.texts.read(None, each.id) is None]
    service.keep(None, [Uploaded.now(each.id, each.text, None) for each in new])


def _end(*_: object) -> None:
    """What uvicorn leaves of a SIGTERM once its answers have ended: the store is closed, too."""
    raise SystemExit(ExitCode.OK)


def _shares(keyring: Keyring | None, quota_mib: int | None, settings: Settings) -> Shares | None:
    if quota_mib is None:
        if keyring is not None and keyring.file.quotas:
            rule = "the key file has quotas of some tenants; say what the others may keep: --tenant-quota-mib MIB"
            raise InputError("tenant-quota-mib", rule)
        return None
    if keyring is None:
        raise InputError("tenant-quota-mib", "goes with --api-keys; a tenant alone has all of the store", quota_mib)
    from kvquilt.server.shares import Shares

    shares = Shares(keyring, quota_mib << 20)
    if told := shares.check(settings.memory_bytes, settings.disk_bytes):
        warn(told)
    return shares


def _keyring(path: Path | None) -> Keyring | None:
    if path is None:
        return None
    from kvquilt.server.keyring import Keyring

    return Keyring(path)
