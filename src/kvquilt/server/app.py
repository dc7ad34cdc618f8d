"""The web application: routes, and what stands around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from functools import cache, partial

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from kvquilt.server import completions, documents, models, page_files, probes, tenant_state
from kvquilt.server.access import guard
from kvquilt.server.described import describe
from kvquilt.server.failures import RefusalError
from kvquilt.server.middleware import Around
from kvquilt.server.record import Record, record_of
from kvquilt.server.service import Service

# FastAPI tells whatever OpenTelemetry finds in the process; what is told of requests here is in metrics, log and
# `kvquilt.server.traces` alone
SILENT: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}


def make_app(service: Service, told: Sequence[Callable[[Record], object]] = ()) -> FastAPI:
    """The application over one service; no state of its own. `told` of every request at its end, as the metrics are."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(service.start)
        try:
            yield
        finally:
            await asyncio.to_thread(service.stop)

    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan, telemetry=SILENT)
    app.openapi = cache(partial(describe, app))  # type: ignore[method-assign]
    app.include_router(probes.routes(service))
    app.include_router(page_files.routes())
    for each in (completions, documents, models, tenant_state):
        app.include_router(each.routes(service), dependencies=[Depends(guard(service.keyring))])
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(RequestValidationError, _bad_query)
    app.add_middleware(Around, ended=(service.metrics.ended, *told))
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "http_error")
    record_of(request).fault = code
    rule = f"there is no such route{_like(request)}" if error.status_code == 404 else error.detail
    told = RefusalError(error.status_code, code, f"{request.method} {request.url.path}: {rule}")
    return JSONResponse(told.body, error.status_code, headers=error.headers)


def _like(request: Request) -> str:
    paths = list(request.app.openapi()["paths"])
    close = get_close_matches(request.url.path, paths, n=1)
    return f"; did you mean {close[0]}?" if close else "; GET /openapi.json lists them"


async def _bad_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    told = RefusalError(400, "invalid_value", f"{param}: {first['msg']}", param)
    record_of(request).fault = told.code
    return JSONResponse(told.body, told.status)
