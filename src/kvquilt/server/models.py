"""``/v1/models`` and ``/tokenize``: what is served."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

from kvquilt.server.asked import TokenizeAsked
from kvquilt.server.body import checked, read_json
from kvquilt.server.described import takes
from kvquilt.server.paths import WHOLE
from kvquilt.server.record import record_of
from kvquilt.server.service import Service


def routes(service: Service) -> APIRouter:
    router, created = APIRouter(), int(time.time())

    def card() -> dict[str, Any]:
        length = service.engine.model.capability.max_length
        return {
            "id": service.name, "object": "model", "created": created, "owned_by": "kvquilt", "max_model_len": length,
        }  # fmt: skip

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @router.get(f"/v1/models/{{name:{WHOLE}}}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card()

    @router.post("/tokenize", openapi_extra=takes(TokenizeAsked))
    async def tokenize(request: Request) -> dict[str, Any]:
        asked = checked(TokenizeAsked, await read_json(request, service.limits))
        service.check_model(asked.model)
        _, runs = await service.prompt(asked, record_of(request).tenant)
        ids = [i for run in runs for i in run.ids]
        return {"count": len(ids), "max_model_len": service.engine.model.capability.max_length, "tokens": ids}

    return router
