"""``/health``, ``/ready`` and ``/metrics``: for who watches the server; with keys, ``/metrics`` needs an operator's."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from kvquilt.server.access import operator_guard
from kvquilt.server.failures import stopping
from kvquilt.server.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        if not service.running:
            raise stopping()
        return JSONResponse({"status": "ready", "model": service.name})

    @router.get("/metrics", dependencies=[Depends(operator_guard(service.keyring))])
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(service.metrics.text), media_type=CONTENT_TYPE_LATEST)

    return router
