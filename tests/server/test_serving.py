"""Many clients at once, clients that go away, deadlines, bounds, and the end of a server."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from kvquilt.compiling import compile_documents
from kvquilt.engine import Engine
from kvquilt.model.slots import SlotCache, SlotPool
from kvquilt.model.steps import Steps
from kvquilt.server.limits import Limits
from kvquilt.server.scheduler import Ticket
from tests.engines import AFFORDABLE, at_rest, documents
from tests.server.running import MODEL, Served, serving
from tests.waiting import until

Ask = dict[str, Any]


def body(count: int = 2, length: int = 8) -> Ask:
    parts = [{"type": "document", "id": each.id, "text": each.text} for each in documents(count)]
    content: Any = [*parts, {"type": "text", "text": "What is it?"}]
    return {
        "model": MODEL, "temperature": 0, "max_tokens": length, "messages": [{"role": "user", "content": content}],
        "extra_body": {"kvquilt": {"method": "none"}},
    }  # fmt: skip


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Decoding steps wait until it is set."""
    go, step = threading.Event(), Steps.step

    def stepped(self: Steps, *args: Any) -> Any:
        assert go.wait(30)
        return step(self, *args)

    monkeypatch.setattr(Steps, "step", stepped)
    return go


def test_streams_at_once_get_what_each_gets_alone() -> None:
    with serving(Limits(streams=3)) as served:
        asked = [body(1 + n % 3, 6) for n in range(8)]
        alone = [served.client().chat.completions.create(**each).choices for each in asked]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda each: served.client().chat.completions.create(**each).choices, asked))
        assert found == alone
        served.rests()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_everything(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = [], Steps.step

    def stepped(self: Steps, *args: Any) -> Any:
        steps.append(1)
        time.sleep(0.02)
        return step(self, *args)

    monkeypatch.setattr(Steps, "step", stepped)
    with serving() as served:
        long = {**body(1, 700), "logit_bias": {}}
        sent = {**{k: v for k, v in long.items() if k != "extra_body"}, **long["extra_body"], "stream": stream}
        http = served.http()
        with http.stream("POST", "/v1/chat/completions", json=sent) if stream else _started(http, sent):
            until(lambda: len(steps) > 3)
            assert served.service.scheduler.streams == 1
        http.close()
        until(lambda: served.service.scheduler.streams == 0)
        assert len(steps) < 600
        served.rests()


class _started:
    """A request whose answer nobody waits for; the connection is closed at the end."""

    def __init__(self, http: Any, sent: Any) -> None:
        import json

        self._socket = socket.create_connection((http.base_url.host, http.base_url.port))
        raw = json.dumps(sent).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(raw)}\r\n"
        self._socket.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + raw)

    def __enter__(self) -> None:
        return

    def __exit__(self, *exc: object) -> None:
        self._socket.close()


def test_one_that_waits_and_goes_away_leaves_the_line(held: threading.Event) -> None:
    with serving(Limits(streams=1)) as served, ThreadPoolExecutor(2) as pool:
        first = pool.submit(served.client().chat.completions.create, **body())
        until(lambda: served.service.scheduler.streams == 1)
        with pytest.raises(openai.APITimeoutError):
            served.client().with_options(timeout=0.5).chat.completions.create(**body())
        until(lambda: served.service.scheduler.waiting == 0)
        held.set()
        assert first.result(30).choices
        served.rests()


def test_a_full_queue_and_a_deadline_are_told(held: threading.Event) -> None:
    with serving(Limits(streams=1, queue=1, deadline=3.0)) as served, ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: list(served.client().chat.completions.create(stream=True, **body())))
        until(lambda: served.service.scheduler.streams == 1)
        second = pool.submit(served.client().chat.completions.create, **body())
        until(lambda: served.service.scheduler.waiting == 1)
        with pytest.raises(openai.InternalServerError) as full:
            served.client().chat.completions.create(**body())
        assert (full.value.status_code, full.value.code) == (503, "queue_full")
        assert full.value.response.headers["retry-after"] == "2"
        late = second.exception(30)
        assert isinstance(late, openai.InternalServerError)
        assert (late.status_code, late.code) == (504, "deadline_exceeded")
        cut = first.exception(30)
        assert isinstance(cut, openai.APIError)
        assert cut.code == "deadline_exceeded"
        held.set()
        served.rests()


def test_a_prompt_that_never_fits_is_refused_with_the_bytes() -> None:
    with serving(Limits(cache_bytes=1 << 16)) as served:
        per_token = served.engine.reader.layout().bytes_per_token
        most = (1 << 16) // per_token // 64 * 64
        with pytest.raises(openai.APIStatusError, match="bytes of cache") as caught:
            served.client().chat.completions.create(**body(1, most))
        assert (caught.value.status_code, caught.value.code) == (413, "cache_too_small")
        served.rests()


def test_no_answer_has_more_caches_than_were_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the method and its writer, compiling and second caches included; and after reading only its own."""
    admitted, peaks, kept = [], [0], []
    admit, lend, step = Ticket.admitted, SlotPool._lend, Steps.step

    async def noted(self: Ticket, size: int, reading: int = 0) -> None:
        admitted.append((size, reading))
        await admit(self, size, reading)

    def lent(self: SlotPool, cache: SlotCache) -> SlotCache:
        out = lend(self, cache)
        peaks[-1] = max(peaks[-1], sum(each.nbytes for each in self._out))
        return out

    def stepped(self: Steps, cache: SlotCache, *args: Any) -> Any:
        kept.append(cache.nbytes)
        return step(self, cache, *args)

    monkeypatch.setattr(Ticket, "admitted", noted)
    monkeypatch.setattr(SlotPool, "_lend", lent)
    monkeypatch.setattr(Steps, "step", stepped)
    with serving(trained=True) as served:
        helper = served.engine.reader.helper
        assert helper is not None
        for n, (name, method) in enumerate(sorted(AFFORDABLE.items())):
            asked = {**body(3), "extra_body": {"kvquilt": {"method": method}}}
            for part in asked["messages"][0]["content"][:-1]:
                part["text"] += f" {n}"  # compiled by every method anew
            peaks.append(0)
            kept.clear()
            answer = served.client().chat.completions.create(**asked)
            served.rests()
            size, reading = admitted[-1]
            assert peaks[-1] <= size + reading, name
            assert max(kept) <= size, name
            assert answer.kvquilt["method"].startswith(name.partition(":")[0])
        assert any(reading for _, reading in admitted)
        at_rest(served.engine)


def test_compiling_takes_its_room_beside_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a server's whole room, no cache of a document is there while answers have it."""
    go, real, peak = threading.Event(), Engine.compile, []

    def compile(self: Engine, *args: Any, **options: Any) -> Any:
        peak.append(served.service.scheduler.bytes)
        assert go.wait(30)
        return real(self, *args, **options)

    monkeypatch.setattr(Engine, "compile", compile)
    with serving(Limits(cache_bytes=1 << 20), tmp_path) as served:
        scheduler = served.service.scheduler
        texts = [{"id": each.id, "text": each.text} for each in documents(4)]
        with scheduler.beside(1 << 20, lambda: False) as given:
            assert given
            served.http().post("/v1/documents", json={"documents": texts})
            until(lambda: scheduler._wanted > 0)
            assert not peak
        until(lambda: len(peak) == 1)
        assert 0 < peak[0] == scheduler.bytes <= 1 << 20
        go.set()
        until(lambda: served.http().get("/v1/documents/break").json()["state"] == "ready")
        served.rests()
        assert scheduler.bytes == 0


def test_a_document_that_would_never_fit_fails_and_says_so(tmp_path: Path) -> None:
    with serving(Limits(cache_bytes=1 << 18), tmp_path) as served:
        per_token = served.engine.reader.layout().bytes_per_token
        words = (1 << 18) // per_token
        served.http().post("/v1/documents", json={"id": "large", "text": "a " * min(words, 900)})
        until(lambda: served.http().get("/v1/documents/large").json()["state"] in ("failed", "ready"))
        told = served.http().get("/v1/documents/large").json()
        assert "bytes of cache" in told["error"]
        served.rests()


def test_a_prompt_is_read_while_another_streams(held: threading.Event) -> None:
    with serving(Limits(streams=2)) as served:
        first = iter(served.client().chat.completions.create(stream=True, **body(1)))
        assert next(first).choices[0].delta.role == "assistant"
        second = iter(served.client().chat.completions.create(stream=True, **body(2)))
        assert next(second).choices[0].delta.role == "assistant"
        assert served.service.scheduler.streams == 2
        held.set()
        assert [list(each)[-1].choices[0].finish_reason for each in (first, second)] == ["length"] * 2
        served.rests()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_clients_do_all_is_given_back(seed: int) -> None:
    """Many at once: streams left early, answers nobody waits for, prompts that cannot be answered."""
    draw = random.Random(seed)

    def one(n: int) -> None:
        kind, pieces = choices[n]
        client = served.client()
        if kind == "leaves":
            with client.chat.completions.create(stream=True, **body(1 + n % 4, 60)) as stream:
                for _ in zip(range(pieces), stream, strict=False):
                    pass
        elif kind == "impatient":
            with contextlib.suppress(openai.APITimeoutError):
                client.with_options(timeout=0.01 * pieces).chat.completions.create(**body(1 + n % 4, 60))
        elif kind == "wrong":
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(**body(2, 5000))
        else:
            assert client.chat.completions.create(**body(1 + n % 4, 4)).usage.completion_tokens == 4

    kinds = ("leaves", "impatient", "wrong", "stays")
    choices = [(draw.choice(kinds), draw.randrange(1, 20)) for _ in range(16)]
    with serving(Limits(streams=4)) as served:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(len(choices))))
        served.rests()
        assert not served.service._answers


def test_too_many_documents_in_a_prompt() -> None:
    with serving(Limits(documents=2)) as served, pytest.raises(openai.BadRequestError, match="more than 2 documents"):
        served.client().chat.completions.create(**body(3))


def test_a_failure_that_nobody_expected_says_its_id_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("the secret text of a document")

    monkeypatch.setattr(Steps, "step", broken)
    with serving() as served, caplog.at_level("INFO", "kvquilt.server"):
        with pytest.raises(openai.InternalServerError) as caught:
            served.client().chat.completions.create(**body())
        served.rests()
    assert caught.value.status_code == 500
    assert "secret" not in str(caught.value) + caplog.text
    facts = [record.facts for record in caplog.records if record.getMessage() == "request"]
    assert (facts[-1]["request_id"], facts[-1]["fault"]) == (caught.value.request_id, "ZeroDivisionError")


def test_a_failure_within_a_stream_is_in_the_log_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps, step = [], Steps.step

    def broken(self: Steps, *args: Any) -> Any:
        steps.append(1)
        if len(steps) > 20:  # pieces were sent by then
            raise ZeroDivisionError("the secret text of a document")
        return step(self, *args)

    monkeypatch.setattr(Steps, "step", broken)
    with serving() as served, caplog.at_level("INFO", "kvquilt.server"):
        with pytest.raises(openai.APIError, match="names it by the request's id") as caught:
            list(served.client().chat.completions.create(stream=True, **body(1, 60)))
        until(lambda: any(record.getMessage() == "request" for record in caplog.records))
        served.rests()
    assert caught.value.code == "internal_error"
    assert "secret" not in caplog.text
    (failure,) = [record.facts for record in caplog.records if record.getMessage() == "failure"]
    (request,) = [record.facts for record in caplog.records if record.getMessage() == "request"]
    assert (request["status"], request["fault"]) == (200, failure["fault"]) == (200, "ZeroDivisionError")
    assert request["request_id"] == failure["request_id"]
    assert any("test_serving.py" in place for place in failure["at"])


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/completions", "application/json"), ("/v1/documents", "application/x-ndjson")]
)
def test_a_client_that_goes_away_within_its_body_is_no_failure(
    path: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as served, caplog.at_level("INFO", "kvquilt.server"):
        host, _, port = served.url.rpartition("/")[2].partition(":")
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: 99\r\n\r\n"
        with socket.create_connection((host, int(port))) as made:
            made.sendall(head.encode() + b'{"text": "The bakery opens at six."}\n{')
        until(lambda: any(record.getMessage() == "request" for record in caplog.records))
        served.rests()
    (line,) = [record.facts for record in caplog.records if record.getMessage() == "request"]
    assert (line["path"], line["status"], line["fault"]) == (path, 499, "client_gone")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_told_to_stop_it_ends_what_it_began_and_keeps_what_it_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Steps.step

    def slow(self: Steps, *args: Any) -> Any:
        time.sleep(0.05)
        return step(self, *args)

    monkeypatch.setattr(Steps, "step", slow)
    with ThreadPoolExecutor(1) as pool:
        with serving(directory=tmp_path) as served:
            answer = pool.submit(served.client().chat.completions.create, **body(1, 20))
            until(lambda: served.service.scheduler.streams == 1)
            texts = [{"id": each.id, "text": each.text} for each in documents(8)]
            served.http().post("/v1/documents", json={"documents": texts})
            until(lambda: len(served.engine.store.ls()) > 2)
            kept, served._clients = served._clients, []  # they are not closed before the server is told to stop
        assert answer.result(30).usage.completion_tokens == 20
        with pytest.raises(openai.APIConnectionError):
            kept[0].models.list()
    for client in kept:
        client.close()
    with serving(directory=tmp_path) as again:
        report = compile_documents(again.engine.reader, documents(8), None)
        assert report.stored_before > 0


def test_streams_beyond_the_grace_are_cut_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Steps.step

    def slow(self: Steps, *args: Any) -> Any:
        time.sleep(0.1)
        return step(self, *args)

    monkeypatch.setattr(Steps, "step", slow)
    found: list[Served] = []
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        with serving(Limits(grace=1.0)) as served:
            found.append(served)
            cut = pool.submit(lambda: list(served.client().chat.completions.create(stream=True, **body(1, 600))))
            until(lambda: served.service.scheduler.streams == 1)
            kept, served._clients = served._clients, []
        assert time.monotonic() - began < 25
        assert cut.exception(30) is not None
        kept[0].close()
    at_rest(found[0].engine)


def test_counts_and_lines(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served, caplog.at_level("INFO", "kvquilt.server"):
        http = served.http()
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json() == {"status": "ready", "model": MODEL}
        assert [http.head(path).status_code for path in ("/health", "/ready")] == [200, 200], "as some probes ask"
        answer = served.client().chat.completions.create(extra_headers={"x-request-id": "mine.1"}, **body())
        near, far = http.post("/chat/completions"), http.get("/v2")
        assert near.json()["error"]["message"].endswith("there is no such route; did you mean /v1/chat/completions?")
        assert far.json()["error"]["message"].endswith("there is no such route; GET /openapi.json lists them")
        odd = http.get("/v1/nothing", headers={"x-request-id": 'a"b\\'})
        assert odd.json()["error"]["code"] == "unknown_url"
        assert odd.headers["x-request-id"].startswith("req-")
        assert http.get("/v1/chat/completions").json()["error"]["code"] == "method_not_allowed"
        text = http.get("/metrics").text
        served.rests()
    assert answer._request_id == "mine.1"
    tokens = answer.usage
    for provenance in ("reused", "inline"):
        count = answer.kvquilt["tokens"][provenance]
        assert f'kvquilt:prompt_tokens_total{{model_name="tiny",provenance="{provenance}"}} {float(count)}' in text
    assert f'kvquilt:generation_tokens_total{{model_name="tiny"}} {float(tokens.completion_tokens)}' in text
    assert 'kvquilt:requests_total{model_name="tiny",path="/v1/chat/completions",status="200"} 1.0' in text
    assert 'kvquilt:store_bytes{model_name="tiny",tenant="",tier="memory"}' in text
    assert 'kvquilt:num_requests_running{model_name="tiny"} 0.0' in text
    lines = [record.facts for record in caplog.records if record.getMessage() == "request"]
    (mine,) = [line for line in lines if line["request_id"] == "mine.1"]
    assert (mine["path"], mine["status"], mine["ran"]) == ("/v1/chat/completions", 200, "none")
    assert (mine["prompt_tokens"], mine["completion_tokens"]) == (tokens.prompt_tokens, tokens.completion_tokens)
    assert documents(1)[0].text[:20] not in caplog.text
