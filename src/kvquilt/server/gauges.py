"""What stands now, for ``/metrics``: queue, caches, documents, tiers of the store by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvquilt.engine import Engine
from kvquilt.identity import namespace
from kvquilt.server.library import Library
from kvquilt.server.scheduler import Scheduler
from kvquilt.store import TierStats
from kvquilt.store.breaker import BreakerState

OTHERS = "(others)"  # namespaces of nobody who has a key


@dataclass(frozen=True, slots=True)
class Gauges:
    """Asked when it is read.

    Attributes:
        model: as clients call it; a label of all that is told, as of all that is counted.
        tenants: whose bytes are told by name; who reads this is the operator.
    """

    model: str
    engine: Engine
    scheduler: Scheduler
    library: Library
    tenants: Callable[[], Sequence[str | None]]

    def collect(self) -> Iterator[Metric]:
        pool = self.engine.model.pool.stats()
        for name, told, value in (
            ("num_requests_running", "Requests that are being answered.", self.scheduler.streams),
            ("num_requests_waiting", "Requests in the queue.", self.scheduler.waiting),
            ("cache_bytes", "Bytes of caches lent to requests and to compiling.", pool.lent_bytes),
            ("cache_bytes_admitted", "Bytes that admitted requests and compiling may take.", self.scheduler.bytes),
        ):
            one = gauge(name, told)
            one.add_metric([self.model], value)
            yield one
        documents = gauge("documents", "Uploaded documents by state.", "state")
        for state, count in self.library.counts().items():
            documents.add_metric([self.model, state], count)
        yield documents
        yield self._held()
        yield from counted(self.model, self.engine.store.stats())

    def _held(self) -> Metric:
        names = {namespace(tenant): tenant or "" for tenant in self.tenants()}
        held = gauge("store_bytes", "Bytes of segments.", "tier", "tenant")
        for tier in self.engine.store.tiers:
            if tier.lasting:  # one elsewhere does not know
                sizes = Counter(dict.fromkeys(names.values(), 0))
                for space, size in tier.sizes().items():
                    sizes[names.get(space, OTHERS)] += size
                for tenant, size in sizes.items():
                    held.add_metric([self.model, tier.name, tenant], size)
        return held


def gauge(name: str, told: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvquilt:{name}", told, labels=["model_name", *labels])


def counter(name: str, told: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvquilt:{name}", told, labels=["model_name", *labels])


def counted(model: str, tiers: Mapping[str, TierStats]) -> Iterator[Metric]:
    """Of every tier what it counted since it was opened, and how a remote one is."""
    hits = counter("store_hits", "Segments found.", "tier")
    misses = counter("store_misses", "Segments not found, and why.", "tier", "reason")
    errors = counter("store_errors", "Segments not kept, and why.", "tier", "reason")
    evictions = counter("evictions", "Segments evicted.", "tier")
    damage = counter("integrity_failures", "Segments found damaged, or another's in their place.", "tier")
    pinned = gauge("store_pinned", "Segments that requests in work hold.", "tier")
    waiting = gauge("store_writes_waiting", "Writes not yet sent.", "tier")
    breaker = gauge("store_breaker", "1 for the state it is in.", "tier", "state")
    for tier, stats in tiers.items():
        hits.add_metric([model, tier], stats.hits)
        evictions.add_metric([model, tier], stats.evictions)
        damage.add_metric([model, tier], stats.integrity_failures)
        pinned.add_metric([model, tier], stats.pinned)
        for reason, count in stats.misses.items():
            misses.add_metric([model, tier, reason], count)
        for reason, count in stats.failures.items():
            errors.add_metric([model, tier, reason], count)
        if stats.breaker:
            waiting.add_metric([model, tier], stats.waiting)
            for state in BreakerState:
                breaker.add_metric([model, tier, state.value], stats.breaker == state.value)
    yield from (hits, misses, errors, evictions, damage, pinned, waiting, breaker)
