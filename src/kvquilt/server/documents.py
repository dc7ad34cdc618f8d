"""``/v1/documents``: upload, list, look at, delete."""

from __future__ import annotations

import asyncio
from itertools import dropwhile, islice
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from kvquilt.errors import KvquiltError
from kvquilt.identity import PUBLIC
from kvquilt.prompt import check_documents
from kvquilt.server.body import LINES, checked, media_type, read_json, read_lines
from kvquilt.server.described import takes
from kvquilt.server.entry import Entry
from kvquilt.server.failures import RefusalError, refusal
from kvquilt.server.fields import PUBLIC_IDS, UploadedPart, UploadedParts
from kvquilt.server.library import Library, Shelf
from kvquilt.server.paths import WHOLE
from kvquilt.server.record import record_of
from kvquilt.server.service import Service
from kvquilt.server.texts import Uploaded

ACCEPTED = 202


def routes(service: Service) -> APIRouter:
    router, library = APIRouter(), service.library

    @router.post(
        "/v1/documents", status_code=ACCEPTED, openapi_extra=takes(UploadedPart, UploadedParts, lines=UploadedPart)
    )
    async def upload(request: Request) -> Response:
        tenant = record_of(request).tenant
        if media_type(request) == LINES:
            return JSONResponse(await _stream(service, request, tenant), ACCEPTED)
        data = await read_json(request, service.limits, [LINES])
        if isinstance(data, dict) and "documents" in data:
            several = [_uploaded(part) for part in checked(UploadedParts, data).documents]
            check_documents([each.document for each in several])
            entries = await asyncio.to_thread(service.keep, tenant, several)
            return JSONResponse({"object": "list", "data": [each.as_dict() for each in entries]}, ACCEPTED)
        one = _uploaded(checked(UploadedPart, data))
        (entry,) = await asyncio.to_thread(service.keep, tenant, [one])
        return JSONResponse(entry.as_dict(), ACCEPTED)

    @router.get("/v1/documents")
    async def listed(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        after: str | None = None,
        public: bool = False,
    ) -> dict[str, Any]:
        prefix = PUBLIC_IDS if public else ""
        shelf = await asyncio.to_thread(library.shelf, PUBLIC if public else record_of(request).tenant)
        entries = await asyncio.to_thread(_sorted, library, shelf)  # there may be tens of thousands
        if after is not None:
            entries = list(dropwhile(lambda each: prefix + each.id != after, entries))
            if not entries:  # it may have been deleted meanwhile: an empty page would look like the end
                raise RefusalError(
                    404, "document_not_found", f"there is no document {after!r} to go on behind", "after"
                )
            entries = entries[1:]
        return {
            "object": "list",
            "data": [{**each.as_dict(), "id": prefix + each.id} for each in islice(entries, limit)],
            "has_more": len(entries) > limit,
        }

    @router.get(f"/v1/documents/{{name:{WHOLE}}}")
    async def state(request: Request, name: str) -> dict[str, Any]:
        entry = await asyncio.to_thread(library.get, record_of(request).tenant, name)
        return {**entry.as_dict(), "id": name}

    @router.delete(f"/v1/documents/{{name:{WHOLE}}}")
    async def remove(request: Request, name: str) -> dict[str, Any]:
        await asyncio.to_thread(service.forget, record_of(request).tenant, name)
        return {"id": name, "object": "document.deleted", "deleted": True}

    return router


def _sorted(library: Library, shelf: Shelf) -> list[Entry]:
    with library.changed:
        entries = list(shelf.values())
    return sorted(entries, key=lambda each: (each.created, each.id))


async def _stream(service: Service, request: Request, tenant: str | None) -> dict[str, Any]:
    """Documents, a line each, taken as they come; the first bad line ends it, and those before stay."""
    taken = 0
    try:
        async for data in read_lines(request, service.limits):
            uploaded = _uploaded(checked(UploadedPart, data))
            await asyncio.to_thread(service.keep, tenant, [uploaded])
            taken += 1
    except (RefusalError, KvquiltError) as error:  # told with how far it came
        told = refusal(error)
        message = f"{told.message}; {taken} documents before it were taken"
        raise RefusalError(told.status, told.code, message, told.param, told.retry_after) from None
    return {"object": "documents.taken", "taken": taken}


def _uploaded(part: UploadedPart) -> Uploaded:
    uploaded = Uploaded.now(part.id, part.text, part.title)
    check_documents([uploaded.document])
    return uploaded
