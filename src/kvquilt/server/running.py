"""The server as a process: where it listens, and how it ends."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from functools import partial

import uvicorn

from kvquilt.errors import InputError
from kvquilt.server.app import make_app
from kvquilt.server.connection import Connection
from kvquilt.server.logs import log
from kvquilt.server.record import Record
from kvquilt.server.service import Service

_SPARE = 64  # connections beyond those that are answered or wait: metrics, health, uploads


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
        InputError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen()  # whoever is told the address before the server accepts waits, and is not refused
    except (OSError, OverflowError) as error:
        made.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            rule = "another program listens there; stop it, or give another port (0 takes a free one)"
            raise InputError("port", rule, f"{host}:{port}") from None
        raise InputError("host", f"cannot listen there: {error}", f"{host}:{port}") from None
    made.set_inheritable(True)
    return made


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Tells the service as soon as it is told itself, not only when the last answer has ended."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stopping()
        log.info("stopping: no more is taken, answers in work may take %g seconds", self._service.limits.grace)
        await super().shutdown(sockets)


def make_server(service: Service, told: Sequence[Callable[[Record], object]] = ()) -> uvicorn.Server:
    """Run it with ``run(sockets=[listener])``. Told to stop, it takes no more, lets answers end within the grace, and
    then cuts them off. `told` of every request at its end."""
    limits = service.limits
    config = uvicorn.Config(
        make_app(service, told),
        http=partial(Connection, most=limits.queue + limits.streams + _SPARE),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=max(1, round(limits.grace)),
    )
    return _Server(config, service)
