"""What one connection may take: so many at once, so long for the head of a request, so long unread."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvquilt.server.failures import RETRY, RefusalError

PATIENCE = 20.0  # seconds for the head of a request; bodies have their own
UNREAD = 60.0  # seconds for a client that reads nothing of what waits to be sent
FULL = RefusalError(503, "too_many_connections", "the server has as many connections as it takes", retry_after=RETRY)


class Connection(H11Protocol):
    """HTTP of one client.

    Args:
        most: connections of the server; a request on one beyond is answered 503, in the manner of all errors.
    """

    def __init__(self, *args: Any, most: int, **named: Any) -> None:
        super().__init__(*args, **named)
        self._most = most
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self.app = _full
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD, self.transport.abort)  # closing would wait for it to read

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for each in (self._late, self._unread):
            if each is not None:
                each.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Whoever sends a head byte by byte would hold a connection for ever: no time begins anew with each byte."""
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self._late is None:
            self._late = self.loop.call_later(PATIENCE, self.transport.close)
        elif not waiting and self._late is not None:
            self._late.cancel()
            self._late = None


async def _full(scope: Any, receive: Any, send: Any) -> None:
    await JSONResponse(FULL.body, FULL.status, headers={**FULL.headers, "connection": "close"})(scope, receive, send)
