"""Around every request: its id, its line in the log, and errors as OpenAI's clients read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvquilt.server import logs
from kvquilt.server.failures import stopping
from kvquilt.server.presence import ClientGoneError
from kvquilt.server.record import ID_HEADER, Record

GONE = 499  # as nginx calls it in its log; nobody is there to read it


class Around:
    """The outermost application; each of `ended` is told of every request at its end."""

    def __init__(self, app: ASGIApp, ended: Sequence[Callable[[Record], object]]) -> None:
        self._app, self._ended = app, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record.of(scope)
        scope.setdefault("state", {})["record"] = record

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = record.id
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except (ClientGoneError, ClientDisconnect):  # while it was answered, or while its body came
            record.status, record.fault = GONE, "client_gone"
        except asyncio.CancelledError:
            record.fault = "cut_off"  # the server's grace is over
            if record.status == 0:  # another may answer it, or this one when it is back
                told = stopping()
                await JSONResponse(told.body, told.status, headers=dict(told.headers))(scope, receive, sent)
            raise
        except Exception as error:  # noqa: BLE001  nothing that happens in a request ends the server
            told = logs.failed(record, error)
            if record.status == 0:
                await JSONResponse(told.body, told.status, headers=dict(told.headers))(scope, receive, sent)
        finally:
            # the template, so that ids of documents in paths make no labels
            record.path = getattr(scope.get("route"), "path", "")
            logs.finished(record)
            for tell in self._ended:
                tell(record)
