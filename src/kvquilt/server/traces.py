"""Spans of requests for OpenTelemetry, with the extra ``otel``; off unless its environment variables ask for them.

A request's spans are made when it has ended, of what was noted on its way, and sent by a thread of their own: whatever
becomes of the collector, no request waits for it. They hold ids of requests, numbers and names of methods, but no text,
no key, no tenant and no document.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from kvquilt import __version__
from kvquilt.server.record import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("kvquilt.server")
SAID = (
    "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL",
)  # fmt: skip
PLACES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PATIENCE = 3.0  # seconds that the end of the server waits for spans that were not sent yet
STAGES = ("prompt", "choose", "lookup", "compile", "place", "probe", "read")  # up to the first token, as they follow


@dataclass(eq=False, slots=True)
class Traces:
    """Tells `exporter` of every request; `close` it once."""

    exporter: SpanExporter
    model: str
    _provider: TracerProvider = field(init=False, repr=False)
    _tracer: Tracer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create()  # of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "kvquilt"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self.exporter))
        self._tracer = self._provider.get_tracer("kvquilt", __version__)

    def ended(self, record: Record) -> None:
        """Spans of one request: itself, what it waited, its prompt by stages, its answer.

        The ledger knows how long stages took, not when they began, so they are laid end to end.
        """
        now, passed = time.time_ns(), record.seconds
        begin = now - _ns(passed)
        above = TraceContextTextMapPropagator().extract(record.trace)
        name = f"{record.method} {record.path}".strip()
        span = self._tracer.start_span(name, above, SpanKind.SERVER, self._attributes(record), start_time=begin)
        if record.fault and not 400 <= record.status < 500:  # a stream that failed began with 200
            span.set_status(Status(StatusCode.ERROR, record.fault))
        if record.admitted:
            admitted = begin + _ns(record.admitted - record.began)
            within = set_span_in_context(span)
            self._child("wait", within, begin, admitted)
            if record.ledger is not None:
                self._answer(record.ledger.seconds, within, admitted, now)
        span.end(now)

    def close(self) -> None:
        """Send what was not sent yet, for `PATIENCE` at most."""
        ending = threading.Thread(target=self._provider.shutdown, name="kvquilt-traces", daemon=True)
        ending.start()
        ending.join(PATIENCE)

    def _answer(self, seconds: Mapping[str, float], within: Context, begin: int, end: int) -> None:
        first = min(end, begin + _ns(seconds.get("first_token", 0.0)))
        prompt = self._tracer.start_span("prompt", within, start_time=begin)
        at = begin
        for stage in STAGES:
            if stage in seconds:
                after = min(first, at + _ns(seconds[stage]))
                self._child(stage, set_span_in_context(prompt), at, after)
                at = after
        prompt.end(first)
        self._child("decode", within, first, end)

    def _child(self, name: str, within: Context, begin: int, end: int) -> None:
        self._tracer.start_span(name, within, start_time=begin).end(end)

    def _attributes(self, record: Record) -> dict[str, AttributeValue]:
        found: dict[str, AttributeValue] = {
            "http.request.method": record.method,
            "http.route": record.path,
            "http.response.status_code": record.status,
            "kvquilt.request_id": record.id,
        }
        if record.fault:
            found["error.type"] = record.fault
        if (ledger := record.ledger) is None:
            return found
        facts = record.facts
        found |= {
            "gen_ai.request.model": self.model,
            "gen_ai.usage.input_tokens": facts["prompt_tokens"],
            "gen_ai.usage.output_tokens": facts["completion_tokens"],
            "kvquilt.method": ledger.method,
            "kvquilt.asked": ledger.asked,
            "kvquilt.stop_reason": facts["stop_reason"],
            "kvquilt.documents": len(ledger.documents),
            "kvquilt.reused_share": ledger.reused_share,
            "kvquilt.fallbacks": facts["fallbacks"],
        }
        found |= {f"kvquilt.tokens.{kind}": count for kind, count in ledger.tokens.items()}
        if ledger.spending is not None:
            found["kvquilt.charged_token_layers"] = ledger.spending.charged
        return found


@contextmanager
def traced(model: str, environment: Mapping[str, str] = os.environ) -> Iterator[Sequence[Callable[[Record], object]]]:
    """Whom a server tells of its requests: nobody, unless OpenTelemetry's standard variables name a collector."""
    kind, disabled, *protocols = (environment.get(name, "").strip().lower() for name in SAID)
    if disabled == "true" or kind == "none" or not (kind or any(map(environment.get, PLACES))):
        yield ()
        return
    if kind not in ("", "otlp"):
        log.warning("no traces: they are sent with OTEL_TRACES_EXPORTER=otlp alone")
        yield ()
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        log.warning("no traces: they need the extra, pip install 'kvquilt[otel]'")
        yield ()
        return
    if next(filter(None, protocols), "http/protobuf") != "http/protobuf":
        log.warning("no traces: they are sent with OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf alone")
        yield ()
        return
    traces = Traces(OTLPSpanExporter(), model)
    try:
        yield (traces.ended,)
    finally:
        traces.close()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
