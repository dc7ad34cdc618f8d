"""Bodies that are too long, too deep, too many or no JSON, without a server."""

from __future__ import annotations

import asyncio
import json
from codecs import BOM_UTF8
from typing import Any

import pytest
from starlette.requests import Request

from kvquilt.server import body
from kvquilt.server.asked import ChatAsked
from kvquilt.server.body import checked, parsed, read_lines
from kvquilt.server.failures import RefusalError
from kvquilt.server.fields import UploadedPart
from kvquilt.server.limits import Limits


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (b'{"a": "\xff"}', "byte 7 is not"),
        (b"{", "at character 1"),
        (b"[" * 5 + b"]" * 5, "nested deeper than 4"),
        (b"[" * 200_000, "ordinary depth"),
        (b"[1,2,3,[4,5,6]]", "more than 6 values"),
        (b"NaN", "ordinary depth and numbers"),
        (b"1" * 5000, "ordinary depth and numbers"),
    ],
)
def test_what_is_not_taken(raw: bytes, rule: str) -> None:
    with pytest.raises(RefusalError, match=rule) as caught:
        parsed(raw, Limits(depth=4, values=6))
    assert caught.value.status == 400


def test_what_just_fits_is_taken() -> None:
    assert parsed(b'{"a": [1, {"b": 2}], "c": 3}', Limits(depth=4, values=6)) == {"a": [1, {"b": 2}], "c": 3}


@pytest.mark.parametrize("raw", [b'{"a": "\xc3\xbc"}', b" \n[1]", b"3"])
def test_a_byte_order_mark_in_front_changes_nothing(raw: bytes) -> None:
    assert parsed(BOM_UTF8 + raw, Limits()) == parsed(raw, Limits())
    for bad in (BOM_UTF8, BOM_UTF8 + BOM_UTF8 + raw, raw + BOM_UTF8):
        with pytest.raises(RefusalError) as caught:
            parsed(bad, Limits())
        assert caught.value.code == "invalid_json"


def request(*chunks: bytes) -> Request:
    waiting = [{"type": "http.request", "body": each, "more_body": n < len(chunks)} for n, each in enumerate(chunks, 1)]

    async def receive() -> Any:
        return waiting.pop(0) if waiting else await asyncio.sleep(60)

    return Request({"type": "http", "headers": [], "method": "POST", "path": "/"}, receive)


def lines(*chunks: bytes, **limits: Any) -> list[Any]:
    async def read() -> list[Any]:
        return [line async for line in read_lines(request(*chunks), Limits(**limits))]

    return asyncio.run(read())


def test_lines_are_found_across_chunks() -> None:
    text = b'{"a": 1}\r\n\n{"b": "\xc3\xbc"}\n[3]'
    expected = [{"a": 1}, {"b": "ü"}, [3]]
    assert lines(text) == expected
    assert lines(*(text[n : n + 1] for n in range(len(text)))) == expected


def test_lines_of_files_with_byte_order_marks_are_those_without() -> None:
    several = BOM_UTF8 + b'{"a": 1}\n' + BOM_UTF8 + b"\r\n" + BOM_UTF8 + b"[3]\n" + BOM_UTF8
    for chunks in ([several], [several[n : n + 1] for n in range(len(several))]):
        assert lines(*chunks) == [{"a": 1}, [3]]


def test_a_line_may_be_too_long_where_the_whole_may() -> None:
    assert len(lines(*[b'"0123456789"\n'] * 100, body_bytes=20)) == 100
    for chunks in ([b'"' + b"0" * 30 + b'"\n'], [b'"' + b"0" * 15, b"0" * 15]):
        with pytest.raises(RefusalError) as caught:
            lines(*chunks, body_bytes=20)
        assert caught.value.status == 413


def test_a_stream_that_stalls_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "PATIENCE", 0.05)

    async def read() -> None:
        stalled = request(b'"a"\n', b"")
        stalled._receive = _first_then_nothing(stalled._receive)
        async for _ in read_lines(stalled, Limits()):
            pass

    with pytest.raises(RefusalError) as caught:
        asyncio.run(read())
    assert caught.value.status == 408


def _first_then_nothing(receive: Any) -> Any:
    given: list[int] = []

    async def stalled() -> Any:
        if given:
            await asyncio.sleep(60)
        given.append(1)
        return await receive()

    return stalled


@pytest.mark.parametrize(
    ("kind", "data", "rule"),
    [
        (ChatAsked, {"messages": [], "kvquilt": {}}, "messages: must not be empty"),
        (ChatAsked, {}, "messages: is needed"),
        (
            ChatAsked,
            {"messages": [{"role": "user", "content": "x"}], "kvquilt": {"budgt": "5%"}},
            "kvquilt.budgt: unrecognized field; did you mean 'budget'?",
        ),
        (
            ChatAsked,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0: type must be one of 'text', 'document'",
        ),
        (
            ChatAsked,
            {"messages": [{"role": "user", "content": [{"type": "document", "id": "a", "tilte": "b"}]}]},
            "messages.0.content.0.document.tilte: unrecognized field; did you mean 'title'?",
        ),
        (UploadedPart, {"text": "x", "metadata": {}}, "metadata: unrecognized field; valid: id, text, title"),
        (UploadedPart, {"id": "", "text": "x"}, "id: must not be empty"),
        (UploadedPart, [], "body: must be an object"),
    ],
)
def test_the_field_at_fault_is_told_in_plain_words(kind: Any, data: Any, rule: str) -> None:
    with pytest.raises(RefusalError) as caught:
        checked(kind, data)
    assert (caught.value.message, caught.value.param) == (rule, rule.partition(":")[0])


def test_no_error_quotes_what_was_sent() -> None:
    for kind, data in (
        (UploadedPart, {"text": ["a secret"]}),
        (ChatAsked, {"messages": [{"role": "user", "content": {"a secret": 1}}]}),
        (ChatAsked, {"messages": [{"role": "user", "content": "x"}], "stop": [{"a secret": 1}]}),
    ):
        with pytest.raises(RefusalError) as caught:
            checked(kind, data)
        assert "secret" not in json.dumps(caught.value.body)
