"""The web application: routes, and what stands around them."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from kvquilt.server import completions, models, state
from kvquilt.server.failures import RefusalError
from kvquilt.server.middleware import Around
from kvquilt.server.record import record_of
from kvquilt.server.service import Service


def make_app(service: Service) -> FastAPI:
    """The application over one service; no state of its own."""
    app = FastAPI(title="kvquilt", openapi_url=None)
    app.include_router(state.routes(service))
    for each in (completions, models):
        app.include_router(each.routes(service))
    app.add_exception_handler(HTTPException, _no_route)
    app.add_middleware(Around)
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "http_error")
    record_of(request).fault = code
    told = RefusalError(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(told.body, error.status_code, headers=error.headers)
