"""``/metrics``: what answers and requests were, counted for Prometheus; no tenant and no document is named."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kvquilt.answer import Answer
from kvquilt.compiling import CompileReport
from kvquilt.ledger import Provenance
from kvquilt.server.record import Record
from kvquilt.store.store import COMPILED

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
NOWHERE = ("-", COMPILED)  # sources of documents that no tier had
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
    queries: dict[str, Counter] = field(init=False)
    prefix_hits: Counter = field(init=False)
    document_hits: Counter = field(init=False)
    charged: Histogram = field(init=False)
    recomputed: Histogram = field(init=False)
    request_seconds: Histogram = field(init=False)
    first_token: Histogram = field(init=False)
    queued: Histogram = field(init=False)
    gaps: Histogram = field(init=False)
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
        # an exact hit and a stitched one are never one number: each has queries of its own
        self.queries = {
            "prefix": counted("prefix_cache_queries", "Tokens of prompts."),
            "document": counted("document_cache_queries", "Tokens of documents in prompts."),
        }
        self.prefix_hits = counted(
            "prefix_cache_hits", "Prompt tokens behind the very tokens they were encoded behind."
        )
        self.document_hits = counted("document_cache_hits", "Tokens of documents whose segment a tier had.", "tier")
        powers = tuple(float(10**n) for n in range(1, 9))
        self.charged = spread("budget_token_layers", "Token-layers charged beyond pure reuse.", powers)
        self.recomputed = spread("recompute_share", "Of a prompt's document tokens, those computed again.", SHARES)
        self.request_seconds = spread("request_seconds", "From a request's arrival to its end.")
        self.first_token = spread("time_to_first_token_seconds", "From the prompt's turn to its first token.")
        self.queued = spread("queue_seconds", "From a request's place in the queue to its prompt's turn.")
        self.gaps = spread("inter_token_seconds", "Between two pieces of an answer; a piece is mostly one token.", GAPS)
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
        self.queries["prefix"].labels(name).inc(sum(ledger.tokens.values()))
        self.prefix_hits.labels(name).inc(ledger.tokens[Provenance.EXACT])
        held = sum(use.tokens for use in ledger.documents)
        self.queries["document"].labels(name).inc(held)
        for use in ledger.documents:
            if use.source not in NOWHERE:
                self.document_hits.labels(name, use.source).inc(use.tokens)
        if held:
            self.recomputed.labels(name).observe(sum(use.recomputed for use in ledger.documents) / held)
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

    def paced(self, seconds: float) -> None:
        """Note the time between two pieces of an answer; from any thread."""
        self.gaps.labels(self.model).observe(seconds)

    def admitted(self, seconds: float) -> None:
        """Note how long a request waited for its turn."""
        self.queued.labels(self.model).observe(seconds)

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
