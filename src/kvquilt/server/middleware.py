"""Around every request: its id, its line in the log, and errors as OpenAI's clients read them."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvquilt.errors import KvquiltError
from kvquilt.server import logs
from kvquilt.server.failures import RefusalError, refusal
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
        except ClientGoneError:
            record.status, record.fault = GONE, "client_gone"
        except asyncio.CancelledError:
            record.fault = "cut_off"  # the server's grace is over
            raise
        except Exception as error:  # noqa: BLE001  nothing that happens in a request ends the server
            await self._failed(error, record, scope, receive, sent)
        finally:
            # the template, so that ids of documents in paths make no labels
            record.path = getattr(scope.get("route"), "path", "")
            logs.finished(record)
            for tell in self._ended:
                tell(record)

    async def _failed(self, error: Exception, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        told = refusal(error)
        record.fault = told.code
        if not isinstance(error, RefusalError | KvquiltError):
            record.fault = type(error).__name__
            # places alone: the message of an exception may hold a text
            logs.broken(record, [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)])
        if record.status == 0:
            response = JSONResponse(told.body, told.status, headers=dict(told.headers))
            await response(scope, receive, send)
