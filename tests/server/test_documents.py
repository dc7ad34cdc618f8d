"""Documents that are uploaded: compiled in the background, named in requests, kept over a restart."""

from __future__ import annotations

import json
import threading
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvquilt.engine import Engine
from kvquilt.server import compiler
from kvquilt.server.limits import Limits
from tests.engines import documents
from tests.server.running import MODEL, Served, serving
from tests.waiting import until

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 4}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(compiler.Compiler, "_measure", lambda self, tenant: self._measured.add(tenant))
    with serving(directory=tmp_path) as made:
        yield made
        made.rests()


def body(count: int = 3) -> list[dict[str, str]]:
    return [{"id": each.id, "text": each.text} for each in documents(count)]


def state(served: Served, name: str) -> str:
    found = served.http().get(f"/v1/documents/{name}").json()
    return str(found.get("state", found))


def ask(served: Served, *names: str, **kvquilt: Any) -> Any:
    parts: list[Any] = [*({"type": "document", "id": name} for name in names), {"type": "text", "text": "What is it?"}]
    extra = {"kvquilt": {"method": "none", **kvquilt}}
    return served.client().chat.completions.create(
        messages=[{"role": "user", "content": parts}], extra_body=extra, **GREEDY
    )


def test_one_is_uploaded_compiled_named_and_deleted(served: Served) -> None:
    http, one = served.http(), body(1)[0]
    taken = http.post("/v1/documents", json=one)
    assert (taken.status_code, taken.json()["id"]) == (202, "with")
    answer = ask(served, "with")
    assert state(served, "with") == "ready"
    (used,) = answer.kvquilt["documents"]
    assert (used["id"], used["source"], used["provenance"]) == ("with", "memory", "reused")
    assert len(served.engine.store.ls()) > 0
    assert http.delete("/v1/documents/with").json()["deleted"] is True
    assert state(served, "with").find("document_not_found") > 0
    assert not list(served.service.folder.rglob("*.json"))
    kept = [row.tokens for row in served.engine.store.ls()]
    assert used["tokens"] not in kept
    with pytest.raises(openai.NotFoundError):
        ask(served, "with")


@pytest.mark.parametrize("name", [".", "..", "public/x"])
def test_an_id_that_no_url_can_name_is_refused_wherever_it_stands(served: Served, name: str) -> None:
    http, part = served.http(), {"id": name, "text": "a text"}
    for sent in (
        http.post("/v1/documents", json=part),
        http.post("/v1/documents", json={"documents": [part]}),
        http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": [{"type": "document", **part}]}]}
        ),
    ):
        assert (sent.status_code, sent.json()["error"]["code"]) == (400, "invalid_value")
        assert "id" in sent.json()["error"]["param"]


def test_many_at_once_and_as_lines(served: Served) -> None:
    http, several = served.http(), body(8)
    assert [each["id"] for each in http.post("/v1/documents", json={"documents": several[:2]}).json()["data"]] == [
        each["id"] for each in several[:2]
    ]
    lines = "\n".join(map(json.dumps, several[2:])).encode()
    sent = http.post("/v1/documents", content=lines, headers={"content-type": "application/x-ndjson"})
    assert sent.json() == {"object": "documents.taken", "taken": 6}
    until(lambda: all(state(served, each["id"]) == "ready" for each in several))
    first = http.get("/v1/documents", params={"limit": 5}).json()
    rest = http.get("/v1/documents", params={"limit": 5, "after": first["data"][-1]["id"]}).json()
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert {each["id"] for each in first["data"] + rest["data"]} == {each["id"] for each in several}


def test_files_with_a_byte_order_mark_are_taken(served: Served) -> None:
    first, second = body(2)
    for each, kind in ((first, "application/json"), (second, "application/x-ndjson")):
        content, headers = BOM_UTF8 + json.dumps(each).encode(), {"content-type": kind}
        assert served.http().post("/v1/documents", content=content, headers=headers).status_code == 202
        until(lambda name=each["id"]: state(served, name) == "ready")  # type: ignore[misc]


def test_texts_and_segments_survive_a_restart(tmp_path: Path) -> None:
    with serving(directory=tmp_path) as first:
        first.http().post("/v1/documents", json={"documents": body(2)})
        until(lambda: state(first, "break") == "ready")
        before = ask(first, "with", "break")
        files = list(first.service.folder.rglob("*.json"))
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        assert {path.parent.stat().st_mode & 0o777 for path in files} == {0o700}
    with serving(directory=tmp_path) as second:
        until(lambda: state(second, "break") == "ready")
        after = ask(second, "with", "break")
        assert after.choices == before.choices
        assert after.kvquilt["forward_tokens"]["compile"] == 0
        assert {each["source"] for each in after.kvquilt["documents"]} <= {"disk", "memory"}


def test_who_names_one_that_compiles_waits_or_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), Engine.compile

    def compile(self: Engine, *args: Any, **options: Any) -> Any:
        assert go.wait(30)
        return real(self, *args, **options)

    monkeypatch.setattr(Engine, "compile", compile)
    served.http().post("/v1/documents", json=body(1)[0])
    until(lambda: state(served, "with") == "compiling")
    with pytest.raises(openai.ConflictError) as caught:
        ask(served, "with", wait=False)
    assert caught.value.code == "document_not_ready"
    assert int(caught.value.response.headers["retry-after"]) > 0
    with pytest.raises(openai.APIStatusError) as late:
        ask(served, "with", deadline=0.2)
    assert late.value.status_code == 408, "it asked for that"
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(ask(served, "with")))
    waiting.start()
    until(lambda: served.service.scheduler.waiting == 1)
    go.set()
    waiting.join(30)
    assert found[0].kvquilt["documents"][0]["source"] == "memory"


@pytest.mark.parametrize("id", ["none", "long"])
def test_what_is_not_there_or_failed_is_told_whatever_runs(served: Served, id: str) -> None:
    served.http().post("/v1/documents", json={"id": "long", "text": "word " * 3000})
    until(lambda: state(served, "long") == "failed")
    with pytest.raises(openai.APIStatusError) as caught:
        ask(served, id, method="full")
    assert caught.value.code == {"none": "document_not_found", "long": "document_failed"}[id]


def test_another_text_replaces_and_the_same_changes_nothing(served: Served) -> None:
    http = served.http()
    http.post("/v1/documents", json={"id": "a", "text": "The bakery opens at six."})
    first = ask(served, "a")
    http.post("/v1/documents", json={"id": "a", "text": "The bakery opens at six."})
    assert state(served, "a") == "ready"
    assert http.post("/v1/documents", json={"id": "a", "text": "Rye needs two days and a cellar."}).json()["state"] in (
        "queued", "compiling", "ready",
    )  # fmt: skip
    second = ask(served, "a")
    tokens = [answer.kvquilt["documents"][0]["tokens"] for answer in (first, second)]
    assert tokens[0] != tokens[1]
    kept = [row.tokens for row in served.engine.store.ls()]
    assert tokens[0] not in kept
    assert tokens[1] in kept


def test_one_that_cannot_be_compiled_fails_alone(served: Served) -> None:
    texts = [*body(2), {"id": "long", "text": "word " * 3000}]
    served.http().post("/v1/documents", json={"documents": texts})
    until(lambda: state(served, "long") == "failed")
    until(lambda: state(served, "break") == "ready")
    assert "longer than" in served.http().get("/v1/documents/long").json()["error"]
    with pytest.raises(openai.ConflictError) as caught:
        ask(served, "with", "long")
    assert caught.value.code == "document_failed"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        ({"json": {"text": "  "}}, 400, "invalid_value"),
        ({"json": {"text": "a\0b"}}, 400, "invalid_value"),
        ({"json": {"text": 3}}, 400, "invalid_value"),
        ({"json": {"documents": []}}, 400, "invalid_value"),
        ({"json": {"documents": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]}}, 400, "invalid_value"),
        ({"json": {"text": "x", "public": True}}, 400, "invalid_value"),
        ({"content": b"{}"}, 415, "unsupported_media_type"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "invalid_json"),
        ({"content": b'"\xff"', "headers": {"content-type": "application/json"}}, 400, "invalid_utf8"),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400, "invalid_json"),
        ({"content": b'{"text": NaN}', "headers": {"content-type": "application/json"}}, 400, "invalid_json"),
        ({"content": b" " * 70_000, "headers": {"content-type": "application/json"}}, 413, "body_too_large"),
        ({"content": b"x" * 70_000, "headers": {"content-type": "application/x-ndjson"}}, 413, "body_too_large"),
    ],
)
def test_bad_uploads_are_told_and_leave_nothing(tmp_path: Path, sent: Any, status: int, code: str) -> None:
    with serving(Limits(body_bytes=1 << 16 if status == 413 else 1 << 20), tmp_path) as served:
        told = served.http().post("/v1/documents", **sent)
        assert (told.status_code, told.json()["error"]["code"]) == (status, code)
        assert served.http().get("/v1/documents").json()["data"] == []


def test_how_to_declare_a_body_is_told(served: Served) -> None:
    told = served.http().post("/v1/documents", content=b"{}").json()["error"]["message"]
    assert told == "the header content-type must be application/json or application/x-ndjson"
    chat = served.http().post("/v1/chat/completions", content=b"{}").json()["error"]["message"]
    assert "x-ndjson" not in chat


def test_lines_before_a_bad_one_stay(served: Served) -> None:
    lines = json.dumps(body(1)[0]).encode() + b'\n\n{"id": "b"}\n' + json.dumps(body(2)[1]).encode()
    told = served.http().post("/v1/documents", content=lines, headers={"content-type": "application/x-ndjson"})
    assert told.status_code == 400
    assert "1 documents before it were taken" in told.json()["error"]["message"]
    assert [each["id"] for each in served.http().get("/v1/documents").json()["data"]] == ["with"]


def test_a_tenant_keeps_no_more_than_it_may(tmp_path: Path) -> None:
    with serving(Limits(stored=2), tmp_path) as served:
        http = served.http()
        told = http.post("/v1/documents", json={"documents": body(3)})
        assert (told.status_code, told.json()["error"]["code"]) == (413, "quota_exceeded")
        assert "3 documents of yours, and you may keep 2;" in told.json()["error"]["message"]
        assert http.get("/v1/documents").json()["data"] == []
        assert not list(served.service.folder.rglob("*.json"))
        for _ in range(2):  # the second time they are there already
            assert http.post("/v1/documents", json={"documents": body(2)}).status_code == 202
        assert http.post("/v1/documents", json={"text": "one more"}).status_code == 413


def test_a_text_that_cannot_be_read_any_more_is_no_document(served: Served) -> None:
    served.http().post("/v1/documents", json=body(1)[0])
    until(lambda: state(served, "with") == "ready")
    (path,) = served.service.folder.rglob("*.json")
    path.write_bytes(b"{")
    with pytest.raises(openai.NotFoundError):
        ask(served, "with")


@pytest.mark.parametrize(
    "damaged", ["{", "[]", '{"id": "b", "text": 5, "title": null, "created": 1}',
                '{"id": "b", "text": " ", "title": null, "created": 1}',
                '{"id": "b", "text": "Rye.", "title": null, "created": "now"}']
)  # fmt: skip
def test_a_damaged_file_is_left_out_at_the_start_and_said(
    tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(directory=tmp_path) as first:
        first.http().post("/v1/documents", json=body(1)[0])
        (path,) = first.service.folder.rglob("*.json")
    path.with_name("b.json").write_text(damaged)
    with serving(directory=tmp_path) as second:
        assert [each["id"] for each in second.http().get("/v1/documents").json()["data"]] == ["with"]
        assert "cannot be read: b.json" in caplog.text


def test_a_gate_that_breaks_keeps_no_document_from_being_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("the secret text of a document")

    monkeypatch.setattr(Engine, "doctor", broken)
    with serving(directory=tmp_path) as served:
        served.http().post("/v1/documents", json=body(1)[0])
        until(lambda: "ZeroDivisionError" in caplog.text)
        served.http().post("/v1/documents", json=body(2)[1])
        until(lambda: state(served, "break") == "ready")
    assert "secret" not in caplog.text


def test_a_gate_that_measures_ends_with_the_next_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def endless(engine: Engine, documents: Any, *args: Any, **options: Any) -> None:
        while True:  # and asks nobody for how long
            engine.ask("What is it?", documents, method="full", max_new_tokens=1)
            began.set()

    monkeypatch.setattr(Engine, "doctor", endless)
    with serving(directory=tmp_path) as served:
        served.http().post("/v1/documents", json=body(1)[0])
        assert began.wait(20)
        served.service.compiler.stop(20)
        assert not served.service.compiler._thread.is_alive()
