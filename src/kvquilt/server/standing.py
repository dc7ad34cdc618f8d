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
class Standing:
    """Asked when it is read.

    Attributes:
        tenants: whose bytes are told by name; who reads this is the operator.
    """

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
            yield GaugeMetricFamily(f"kvquilt:{name}", told, value=value)
        documents = GaugeMetricFamily("kvquilt:documents", "Uploaded documents by state.", labels=["state"])
        for state, count in self.library.counts().items():
            documents.add_metric([state], count)
        yield documents
        yield self._held()
        yield from counted(self.engine.store.stats())

    def _held(self) -> Metric:
        names = {namespace(tenant): tenant or "" for tenant in self.tenants()}
        held = GaugeMetricFamily("kvquilt:store_bytes", "Bytes of segments.", labels=["tier", "tenant"])
        for tier in self.engine.store.tiers:
            if tier.lasting:  # one elsewhere does not know
                sizes = Counter(dict.fromkeys(names.values(), 0))
                for space, size in tier.sizes().items():
                    sizes[names.get(space, OTHERS)] += size
                for tenant, size in sizes.items():
                    held.add_metric([tier.name, tenant], size)
        return held


def counted(tiers: Mapping[str, TierStats]) -> Iterator[Metric]:
    """Of every tier what it counted since it was opened, and how a remote one is."""
    hits = CounterMetricFamily("kvquilt:store_hits", "Segments found.", labels=["tier"])
    misses = CounterMetricFamily("kvquilt:store_misses", "Segments not found, and why.", labels=["tier", "reason"])
    errors = CounterMetricFamily("kvquilt:store_errors", "Segments not kept, and why.", labels=["tier", "reason"])
    evictions = CounterMetricFamily("kvquilt:evictions", "Segments evicted.", labels=["tier"])
    damage = CounterMetricFamily(
        "kvquilt:integrity_failures", "Segments found damaged, or another's in their place.", labels=["tier"]
    )
    pinned = GaugeMetricFamily("kvquilt:store_pinned", "Segments that requests in work hold.", labels=["tier"])
    waiting = GaugeMetricFamily("kvquilt:store_writes_waiting", "Writes not yet sent.", labels=["tier"])
    breaker = GaugeMetricFamily("kvquilt:store_breaker", "1 for the state it is in.", labels=["tier", "state"])
    for tier, stats in tiers.items():
        hits.add_metric([tier], stats.hits)
        evictions.add_metric([tier], stats.evictions)
        damage.add_metric([tier], stats.integrity_failures)
        pinned.add_metric([tier], stats.pinned)
        for reason, count in stats.misses.items():
            misses.add_metric([tier, reason], count)
        for reason, count in stats.failures.items():
            errors.add_metric([tier, reason], count)
        if stats.breaker:
            waiting.add_metric([tier], stats.waiting)
            for state in BreakerState:
                breaker.add_metric([tier, state.value], stats.breaker == state.value)
    yield from (hits, misses, errors, evictions, damage, pinned, waiting, breaker)
