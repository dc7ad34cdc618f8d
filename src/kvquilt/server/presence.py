"""Work for a client that may go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Found = TypeVar("Found")


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


async def while_there(receive: Receive, work: Coroutine[Any, Any, Found]) -> Found:
    """The result of `work`, which is cancelled, and has ended, when the client goes away.

    Raises:
        ClientGoneError: it did.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Events(Response):
    """Server-sent events as they come.

    Args:
        ended: called when they have ended or nobody reads them any more, even if the first was never asked for.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], ended: Callable[[], object]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._ended = events, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_there(receive, self._send(send))
        finally:
            self._ended()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
