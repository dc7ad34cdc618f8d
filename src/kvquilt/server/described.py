"""``/openapi.json``: the interface for programs that read one. Bodies are read by hand, so they are told by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import kvquilt
from kvquilt.server.asked import ChatAsked, TextAsked, TokenizeAsked
from kvquilt.server.body import JSON, LINES
from kvquilt.server.fields import UploadedPart, UploadedParts

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_FAILED = {"description": "Refused or failed", "content": {JSON: {"schema": {"$ref": _REF.format(model="Error")}}}}
_BODIES: tuple[type[BaseModel], ...] = (ChatAsked, TextAsked, TokenizeAsked, UploadedPart, UploadedParts)


def takes(*kinds: type[BaseModel], lines: type[BaseModel] | None = None) -> dict[str, Any]:
    """What a route says of its body: one of `kinds` as JSON, or `lines`, one on each."""
    choices = [{"$ref": _REF.format(model=kind.__name__)} for kind in kinds]
    content: dict[str, Any] = {JSON: {"schema": choices[0] if len(choices) == 1 else {"anyOf": choices}}}
    if lines is not None:
        content[LINES] = {"schema": {"$ref": _REF.format(model=lines.__name__)}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole interface, OpenAPI 3.1."""
    told = get_openapi(title="kvquilt", version=kvquilt.__version__, routes=app.routes)
    bodies = models_json_schema([(kind, "validation") for kind in _BODIES], ref_template=_REF)[1]["$defs"]
    told["components"] = {
        "schemas": {**bodies, "Error": _ERROR},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    told["security"] = [{"key": []}, {}]  # without a key file no key is asked for
    for path in told["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI's own; ours is a 400
            operation["responses"]["default"] = _FAILED
    return told
