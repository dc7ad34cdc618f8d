"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvquilt.answer import Answer
from kvquilt.server import logs
from kvquilt.server.answering import Answering
from kvquilt.server.asked import ChatAsked, TextAsked
from kvquilt.server.body import checked, read_json
from kvquilt.server.described import takes
from kvquilt.server.presence import Events, while_there
from kvquilt.server.record import Record, record_of
from kvquilt.server.service import Service
from kvquilt.server.shapes import ChatForm, Form, Shape, TextForm, event


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=takes(ChatAsked))
    async def chat(request: Request) -> Response:
        asked = checked(ChatAsked, await read_json(request, service.limits))
        return await _answered(service, request, asked, ChatForm())

    @router.post("/v1/completions", openapi_extra=takes(TextAsked))
    async def text(request: Request) -> Response:
        asked = checked(TextAsked, await read_json(request, service.limits))
        return await _answered(service, request, asked, TextForm())

    return router


async def _answered(service: Service, request: Request, asked: ChatAsked | TextAsked, form: Form) -> Response:
    record = record_of(request)
    shape = Shape(form, record.id, service.name, asked.with_usage, asked.kvquilt.explain)

    async def first() -> tuple[Answering, str | Answer]:
        answering = await service.begin(asked, record.tenant)
        record.admitted = time.perf_counter()
        try:
            return answering, await answering.next()
        except BaseException:
            answering.stop()
            raise

    async def whole() -> Answer:
        answering, found = await first()
        try:
            while isinstance(found, str):
                found = await answering.next()
            return found
        finally:
            answering.stop()

    if not asked.stream:
        answer = await while_there(request.receive, whole())
        service.answered(record, answer)
        return JSONResponse(shape.whole(answer))
    # what fails before the first piece has a status of its own
    answering, found = await while_there(request.receive, first())
    return Events(_events(service, answering, found, shape, record), answering.stop)


async def _events(
    service: Service, answering: Answering, found: str | Answer, shape: Shape, record: Record
) -> AsyncGenerator[bytes, None]:
    try:
        for each in shape.opening():
            yield each
        while isinstance(found, str):
            yield shape.piece(found)
            found = await answering.next()
        service.answered(record, found)
        for each in shape.ending(found):
            yield each
    except Exception as error:  # noqa: BLE001  the status is sent: the stream itself must say it
        yield event(logs.failed(record, error).body)
