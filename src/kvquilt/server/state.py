"""``/health`` and ``/ready``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from kvquilt.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        return JSONResponse({"status": "ready", "model": service.name})

    return router
