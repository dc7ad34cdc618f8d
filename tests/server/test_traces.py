"""Spans of requests: what they say and do not say, and that no request waits for whoever collects them."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvquilt[otel]'")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvquilt.model.steps import Steps
from kvquilt.server import traces
from kvquilt.server.limits import Limits
from kvquilt.server.record import Record
from kvquilt.server.running import make_server
from kvquilt.server.traces import Traces, traced
from tests.engines import documents
from tests.server.running import MODEL, Served, serving
from tests.waiting import until

ABOVE = "4bf92f3577b34da6a3ce929d0e0e4736"
PLACE = "OTEL_EXPORTER_OTLP_ENDPOINT"
CHAT = "POST /v1/chat/completions"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # a sender that was given up goes on for a while, and what it says has no place behind the tests' summary
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    for name in (*traces.SAID, *traces.PLACES, "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collected() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def told(collected: InMemorySpanExporter) -> Iterator[Traces]:
    made = Traces(collected, MODEL)
    yield made
    made.close()


@pytest.fixture
def served(told: Traces, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr("tests.server.running.make_server", partial(make_server, told=[told.ended]))
    with serving(Limits(streams=2)) as made:
        yield made


def asked(**more: Any) -> dict[str, Any]:
    parts = [{"type": "document", "id": each.id, "text": each.text} for each in documents(2)]
    content: Any = [*parts, {"type": "text", "text": "What is it?"}]
    kept = {"model": MODEL, "temperature": 0, "max_tokens": 6, "messages": [{"role": "user", "content": content}]}
    return {**kept, "extra_body": {"kvquilt": {"method": "none"}}, **more}


def spans(told: Traces, collected: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Those of the one completion, by name."""

    def there() -> bool:  # the client has its answer a moment before the server is through with the request
        return told._provider.force_flush() and any(each.name == CHAT for each in collected.get_finished_spans())

    until(there)
    found = collected.get_finished_spans()
    (trace,) = {each.context.trace_id for each in found if each.name == CHAT}
    return {each.name: each for each in found if each.context.trace_id == trace}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_says_what_it_waited_read_and_wrote(
    served: Served, told: Traces, collected: InMemorySpanExporter, stream: bool
) -> None:
    headers = {"traceparent": f"00-{ABOVE}-00f067aa0ba902b7-01", "x-request-id": "mine.1"}
    found = served.client().chat.completions.create(extra_headers=headers, stream=stream, **asked())
    account = list(found)[-1].kvquilt if stream else found.kvquilt
    served.rests()
    all_ = spans(told, collected)
    request = all_[CHAT]
    assert f"{request.context.trace_id:032x}" == ABOVE
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert request.resource.attributes["service.name"] == "kvquilt"
    said = dict(request.attributes or {})
    assert said["kvquilt.request_id"] == "mine.1"
    assert (said["http.response.status_code"], said["kvquilt.method"]) == (200, "none")
    assert said["kvquilt.tokens.reused"] == account["tokens"]["reused"] > 0
    assert said["gen_ai.usage.input_tokens"] == sum(account["tokens"].values())
    assert (said["gen_ai.usage.output_tokens"], said["kvquilt.documents"]) == (6, 2)
    assert request.status.status_code is StatusCode.UNSET

    inside = {"wait", "prompt", "decode"}
    assert {name for name, each in all_.items() if each.parent == request.context} == inside
    assert {name for name, each in all_.items() if each.parent == all_["prompt"].context} >= {"lookup", "place", "read"}
    assert request.start_time == all_["wait"].start_time
    assert all_["wait"].end_time == all_["prompt"].start_time
    assert all_["prompt"].end_time == all_["decode"].start_time
    assert all_["decode"].end_time == request.end_time
    assert all(each.start_time <= each.end_time <= request.end_time for each in all_.values())
    first = all_["prompt"].end_time - all_["prompt"].start_time
    assert first == pytest.approx(account["seconds"]["first_token"] * 1e9, rel=0.01)


def test_no_text_no_key_no_tenant_and_no_document_is_told(
    served: Served, told: Traces, collected: InMemorySpanExporter
) -> None:
    served.client("kvq-secret").chat.completions.create(**asked())
    served.http().get(f"/v1/documents/{documents(1)[0].id}")
    served.rests()
    until(lambda: told._provider.force_flush() and any("documents" in s.name for s in collected.get_finished_spans()))
    all_ = spans(told, collected)
    text = " ".join(each.to_json() for each in collected.get_finished_spans())
    assert "GET /v1/documents/{name:whole}" in {each.name for each in collected.get_finished_spans()}
    assert "What is it" not in text
    assert "kvq-secret" not in text
    assert documents(1)[0].text[:12] not in text
    values = [str(value) for each in all_.values() for value in (each.attributes or {}).values()]
    assert not {each.id for each in documents(2)} & set(values)


def test_what_is_refused_is_no_error_of_the_server_and_a_failure_is(
    served: Served, told: Traces, collected: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(openai.NotFoundError):
        served.client().chat.completions.create(**asked(model="another"))
    served.rests()
    refused = spans(told, collected)
    assert [*refused] == [CHAT]
    (span,) = refused.values()
    assert (span.attributes or {})["error.type"] == "model_not_found"
    assert span.status.status_code is StatusCode.UNSET
    collected.clear()

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("the secret text of a document")

    monkeypatch.setattr(Steps, "step", broken)
    with pytest.raises(openai.APIError):
        list(served.client().chat.completions.create(stream=True, **asked()))
    served.rests()
    failed = spans(told, collected)[CHAT]
    assert failed.status.status_code is StatusCode.ERROR
    assert "secret" not in failed.to_json()


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{ABOVE}-{'0' * 16}-01"])
def test_a_trace_that_is_none_begins_a_new_one(told: Traces, collected: InMemorySpanExporter, header: str) -> None:
    told.ended(Record("GET", "/health", "req-1", status=200, trace={"traceparent": header}))
    told.close()
    (span,) = collected.get_finished_spans()
    assert span.parent is None
    assert f"{span.context.trace_id:032x}" != ABOVE


def test_whoever_is_not_sampled_above_is_not_here(told: Traces, collected: InMemorySpanExporter) -> None:
    told.ended(Record("GET", "/health", "req-1", status=200, trace={"traceparent": f"00-{ABOVE}-00f067aa0ba902b7-00"}))
    told.close()
    assert collected.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("environment", "on", "said"),
    [
        ({}, False, False),
        ({PLACE: "http://127.0.0.1:9"}, True, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, True, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True, False),
        ({PLACE: "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"}, False, False),
        ({PLACE: "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}, False, False),
        ({PLACE: "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "console"}, False, True),
        ({PLACE: "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False, True),
        ({PLACE: "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, False, True),
    ],
)
def test_the_standard_variables_say_whether_anybody_is_told(
    environment: dict[str, str], on: bool, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with traced(MODEL, environment) as told:
        assert bool(told) is on
    assert ("no traces" in caplog.text) is said, "asked for and not there is said, not asked for is not"


@pytest.mark.parametrize("dead", ["refuses", "hangs"])
def test_a_dead_collector_costs_no_request_and_the_end_a_moment(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        port = silent.getsockname()[1] if dead == "hangs" else 9
        monkeypatch.setenv(PLACE, f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")  # every request wakes the sender
        monkeypatch.setattr(traces, "PATIENCE", 0.5)
        began = time.monotonic()
        with traced(MODEL) as told:
            for n in range(5000):  # more than the queue holds
                told[0](Record("GET", "/health", f"req-{n}", status=200))
            within = time.monotonic() - began
        ended = time.monotonic() - began - within
    assert within < 10
    assert ended < 2


def test_where_the_extra_is_missing_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with traced(MODEL, {PLACE: "http://127.0.0.1:9"}) as told:
        assert told == ()
    assert "kvquilt[otel]" in caplog.text
