"""``/metrics``: counts for Prometheus, without names of tenants or documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvquilt.answer import Answer
from kvquilt.compiling import CompileReport
from kvquilt.engine import Engine
from kvquilt.server.library import Library
from kvquilt.server.record import Record
from kvquilt.server.scheduler import Scheduler

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STAGES = {"compile": "compile", "rotate": "place", "repair": "read"}  # our name of a duration: the ledger's stage


@dataclass(eq=False, slots=True)
class Metrics:
    """Of one server; nothing is registered globally."""

    model: str
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    requests: Counter = field(init=False)
    prompt_tokens: Counter = field(init=False)
    forward_tokens: Counter = field(init=False)
    new_tokens: Counter = field(init=False)
    fallbacks: Counter = field(init=False)
    charged: Histogram = field(init=False)
    request_seconds: Histogram = field(init=False)
    first_token: Histogram = field(init=False)
    stages: dict[str, Histogram] = field(init=False)

    def __post_init__(self) -> None:
        def counted(name: str, told: str, *labels: str) -> Counter:
            return Counter(f"kvquilt:{name}", told, ("model_name", *labels), registry=self.registry)

        def spread(name: str, told: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"kvquilt:{name}", told, ("model_name",), registry=self.registry, buckets=buckets)

        self.requests = counted("requests", "Requests that have ended.", "path", "status")
        self.prompt_tokens = counted("prompt_tokens", "Prompt tokens by where their cache is from.", "provenance")
        self.forward_tokens = counted("forward_tokens", "Rows that passed the model, by kind.", "kind")
        self.new_tokens = counted("generation_tokens", "Tokens of answers.")
        self.fallbacks = counted("fallback", "What was expected to be cheaper and was not.", "reason")
        powers = tuple(float(10**n) for n in range(1, 9))
        self.charged = spread("budget_token_layers", "Token-layers charged beyond pure reuse.", powers)
        self.request_seconds = spread("request_seconds", "From a request's arrival to its end.")
        self.first_token = spread("time_to_first_token_seconds", "From the prompt's turn to its first token.")
        self.stages = {
            name: spread(f"{name}_seconds", f"Stage {stage} of a request.") for name, stage in STAGES.items()
        }

    def answered(self, answer: Answer) -> None:
        """Count a finished answer."""
        ledger, name = answer.ledger, self.model
        for provenance, count in ledger.tokens.items():
            self.prompt_tokens.labels(name, str(provenance)).inc(count)
        for kind, count in ledger.forward_tokens.items():
            self.forward_tokens.labels(name, kind).inc(count)
        for fallback in ledger.fallbacks:
            self.fallbacks.labels(name, str(fallback.reason)).inc()
        self.new_tokens.labels(name).inc(len(answer.token_ids))
        if ledger.spending is not None:
            self.charged.labels(name).observe(ledger.spending.charged)
        if "first_token" in ledger.seconds:
            self.first_token.labels(name).observe(ledger.seconds["first_token"])
        for each, stage in STAGES.items():
            if stage in ledger.seconds:
                self.stages[each].labels(name).observe(ledger.seconds[stage])

    def compiled(self, report: CompileReport) -> None:
        """Count a portion of uploaded documents."""
        if report.compiled:
            self.forward_tokens.labels(self.model, "compile").inc(report.forward_tokens)
            self.stages["compile"].labels(self.model).observe(report.seconds)

    def ended(self, record: Record) -> None:
        """Count a request."""
        self.requests.labels(self.model, record.path or "unknown", str(record.status)).inc()
        self.request_seconds.labels(self.model).observe(record.seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands now, asked when it is read: queue, caches, documents, tiers of the store."""

    engine: Engine
    scheduler: Scheduler
    library: Library

    def collect(self) -> Iterator[Metric]:
        pool = self.engine.model.pool.stats()
        for name, told, value in (
            ("num_requests_running", "Requests that are being answered.", self.scheduler.streams),
            ("num_requests_waiting", "Requests in the queue.", self.scheduler.waiting),
            ("cache_bytes", "Bytes of caches lent to requests.", pool.lent_bytes),
            ("cache_bytes_admitted", "Bytes that admitted requests may take.", self.scheduler.bytes),
        ):
            yield GaugeMetricFamily(f"kvquilt:{name}", told, value=value)
        documents = GaugeMetricFamily("kvquilt:documents", "Uploaded documents by state.", labels=["state"])
        for state, count in self.library.counts().items():
            documents.add_metric([state], count)
        yield documents
        tiers = self.engine.store.stats()
        held = GaugeMetricFamily("kvquilt:store_bytes", "Bytes of segments.", labels=["tier"])
        families = {
            "store_hits": CounterMetricFamily("kvquilt:store_hits", "Segments found.", labels=["tier"]),
            "store_errors": CounterMetricFamily("kvquilt:store_errors", "Segments not kept.", labels=["tier"]),
            "evictions": CounterMetricFamily("kvquilt:evictions", "Segments evicted.", labels=["tier"]),
            "damage": CounterMetricFamily("kvquilt:integrity_failures", "Segments found damaged.", labels=["tier"]),
        }
        for tier, stats in tiers.items():
            if stats.bytes is not None:  # a tier elsewhere need not know
                held.add_metric([tier], stats.bytes)
            families["store_hits"].add_metric([tier], stats.hits)
            families["store_errors"].add_metric([tier], sum(stats.failures.values()))
            families["evictions"].add_metric([tier], stats.evictions)
            families["damage"].add_metric([tier], stats.integrity_failures)
        yield held
        yield from families.values()
