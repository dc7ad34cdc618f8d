"""From the bytes of a request to JSON, with a bound on everything."""

from __future__ import annotations

import asyncio
import json
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from kvquilt.server.failures import RefusalError
from kvquilt.server.limits import Limits

Fields = TypeVar("Fields", bound=BaseModel)
PATIENCE = 60.0  # seconds for a body, or for the next piece of a stream of documents
JSON, LINES = "application/json", "application/x-ndjson"
# pydantic's words for what clients get wrong most
_PLAIN = {
    "missing": "is needed",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "model_type": "must be an object",
    "union_tag_invalid": "type must be one of {expected_tags}",
    "union_tag_not_found": "needs a type",
}


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(request: Request, limits: Limits, others: Sequence[str] = ()) -> Any:
    """The body as JSON.

    Args:
        others: media types that the route takes, too, and reads by itself.

    Raises:
        RefusalError: 413 too long, 415 not declared as JSON, 400 no UTF-8, no JSON or nested too deeply.
    """
    # browsers send any other type without asking the server first, so a foreign page could fill a local server
    if media_type(request) != JSON:
        rule = f"the header content-type must be {' or '.join((JSON, *others))}"
        raise RefusalError(415, "unsupported_media_type", rule, "content-type")
    return parsed(await _read(request, limits.body_bytes), limits)


async def read_lines(request: Request, limits: Limits) -> AsyncIterator[Any]:
    """Each line of the body as JSON, as it comes; empty ones are skipped.

    Raises:
        RefusalError: as `read_json`, with the limit on a line.
    """
    held, number = bytearray(), 0
    chunks = aiter(request.stream())
    while (chunk := await _next(chunks)) is not None:
        held += chunk
        if b"\n" in chunk:
            *lines, rest = held.split(b"\n")
            held = bytearray(rest)
            for line in lines:
                number += 1
                if not _empty(line):
                    yield _line(bytes(line), number, limits)
        if len(held) > limits.body_bytes:
            raise _too_long(limits.body_bytes)
    if not _empty(held):
        yield _line(bytes(held), number + 1, limits)


def parsed(raw: bytes, limits: Limits) -> Any:
    """JSON in UTF-8, with finite numbers, and no more levels and values than there may be."""
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")  # the mark that some editors begin files with
    except UnicodeDecodeError as error:
        rule = f"the body must be UTF-8; byte {error.start} is not"
        raise RefusalError(400, "invalid_utf8", rule) from None  # the chained error would carry the body
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        rule = f"the body must be JSON: {error.msg} at character {error.pos}"
        raise RefusalError(400, "invalid_json", rule) from None
    except (RecursionError, ValueError):  # a number of more digits than Python reads is a ValueError
        raise RefusalError(400, "invalid_json", "the body must be JSON of ordinary depth and numbers") from None
    level, values = [data], 0
    for _ in range(limits.depth):
        level = [c for each in level for c in _children(each)]
        values += len(level)
        if values > limits.values:  # each may be an error to tell of
            raise RefusalError(400, "invalid_json", f"the body holds more than {limits.values} values")
        if not level:
            return data
    raise RefusalError(400, "invalid_json", f"the body is nested deeper than {limits.depth} levels")


def checked(kind: type[Fields], data: Any) -> Fields:
    """`data` as `kind`; a `RefusalError` names the first field that breaks its rule, never its content."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # where a field may be of several types, the one that came furthest tells most
        told = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
        context = told.get("ctx", {})
        loc = (*told["loc"], context["unknown"]) if "unknown" in context else told["loc"]
        place = ".".join(each for each in map(str, loc) if "[" not in each)  # types among them are pydantic's
        param = context.get("param") or place or "body"
        rule = _PLAIN[told["type"]].format(**context) if told["type"] in _PLAIN else told["msg"]
        raise RefusalError(400, "invalid_value", f"{param}: {rule}", param) from None


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_long(limit)
    held = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in request.stream():
                held += chunk
                if len(held) > limit:
                    raise _too_long(limit)
    except TimeoutError:
        raise _too_slow() from None
    return bytes(held)


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    """The next one, or None at the end."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await anext(chunks, None)
    except TimeoutError:
        raise _too_slow() from None


def _empty(line: bytearray) -> bool:
    return not line.removeprefix(BOM_UTF8).strip()


def _line(raw: bytes, number: int, limits: Limits) -> Any:
    if len(raw) > limits.body_bytes:
        raise _too_long(limits.body_bytes)
    try:
        return parsed(raw, limits)
    except RefusalError as error:
        raise RefusalError(error.status, error.code, f"line {number}: {error.message}") from None


def _too_long(limit: int) -> RefusalError:
    return RefusalError(413, "body_too_large", f"the body exceeds {limit} bytes")


def _too_slow() -> RefusalError:
    return RefusalError(408, "body_too_slow", f"the body did not come within {PATIENCE:.0f} seconds")


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _no_constant(name: str) -> None:
    raise ValueError(name)
