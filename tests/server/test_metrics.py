"""What /metrics says after known traffic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvquilt.identity import namespace
from kvquilt.server import compiler
from kvquilt.server.gauges import OTHERS, counted
from kvquilt.server.keyring import Keyring
from kvquilt.server.keys import KeyFile, Role
from kvquilt.store import TierStats
from tests.engines import documents
from tests.server.running import MODEL, Served, serving
from tests.server.test_tenants import ready, upload
from tests.store.segments import key_of, make

TEXTS = [each.text for each in documents(4)]


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, str, str, str]]:
    """A server with two tenants' keys and an operator's."""
    monkeypatch.setattr(compiler.Compiler, "_measure", lambda self, tenant: self._measured.add(tenant))
    held, _, ann = KeyFile().added("ann")
    held, _, bob = held.added("bob")
    held, _, operator = held.added(role=Role.OPERATOR)
    held.write(tmp_path / "keys")
    with serving(directory=tmp_path / "store", keyring=Keyring(tmp_path / "keys")) as served:
        yield served, ann, bob, operator
        served.rests()


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(served: Served, key: str) -> Samples:
    return read(served.http(key).get("/metrics").text)


def value(samples: Samples, name: str, **labels: str) -> float:
    """0 where nothing was counted; the model's name stands in all."""
    return samples.get((f"kvquilt:{name}", frozenset({**labels, "model_name": MODEL}.items())), 0.0)


def ask(served: Served, key: str, method: str, *parts: dict[str, str], tokens: int = 6) -> Any:
    content: Any = [*({"type": "document", **part} for part in parts), {"type": "text", "text": "When?"}]
    return served.client(key or "unused").chat.completions.create(
        model=MODEL, temperature=0, max_tokens=tokens, messages=[{"role": "user", "content": content}],
        extra_body={"kvquilt": {"method": method}},
    )  # fmt: skip


def test_tokens_of_prompts_and_documents_asked_for_and_found(keyed: Any) -> None:
    served, ann, bob, operator = keyed
    upload(served, ann, a=TEXTS[0], b=TEXTS[1])
    ready(served, ann, "a", "b")
    answers = [
        ask(served, ann, "none", {"id": "a"}, {"id": "b"}),  # both found
        ask(served, bob, "none", {"text": TEXTS[0]}),  # compiled now
        ask(served, bob, "full", {"text": TEXTS[0]}),  # not asked for
    ]
    samples = scraped(served, operator)
    tokens = [[each["tokens"] for each in answer.kvquilt["documents"]] for answer in answers]
    assert value(samples, "document_cache_queries_total") == sum(map(sum, tokens))
    assert value(samples, "document_cache_hits_total", tier="memory") == sum(tokens[0])
    assert value(samples, "document_cache_hits_total", tier="compiled") == 0
    assert value(samples, "prefix_cache_queries_total") == sum(each.usage.prompt_tokens for each in answers)
    assert value(samples, "prefix_cache_hits_total") == sum(each.kvquilt["tokens"]["exact"] for each in answers)


def test_a_prompt_behind_the_servers_opening_hits_the_prefix(keyed: Any) -> None:
    from kvquilt.engine import SYSTEM

    served, ann, _, operator = keyed
    content: Any = [{"type": "document", "text": TEXTS[0]}, {"type": "text", "text": "When?"}]
    answer = served.client(ann).chat.completions.create(
        model=MODEL, temperature=0, max_tokens=1, extra_body={"kvquilt": {"method": "none"}},
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}],
    )  # fmt: skip
    assert value(scraped(served, operator), "prefix_cache_hits_total") == answer.kvquilt["tokens"]["exact"] > 0


def test_shares_and_times(keyed: Any) -> None:
    served, ann, _, operator = keyed
    two = [{"text": TEXTS[0]}, {"text": TEXTS[1]}]
    answer = ask(served, ann, "epic:k=4", *two)
    ask(served, ann, "none", *two)
    ask(served, ann, "full", *two, tokens=1)
    ask(served, ann, "none")
    samples = scraped(served, operator)
    documents = sum(each["tokens"] for each in answer.kvquilt["documents"])
    assert value(samples, "recompute_share_count") == 3, "a prompt without documents has no share"
    assert value(samples, "recompute_share_sum") == pytest.approx(8 / documents + 0 + 1)
    assert value(samples, "queue_seconds_count") == 4
    # at most one gap less than tokens; text that may still be part of a character waits for the next piece
    assert 3 <= value(samples, "inter_token_seconds_count") <= 15
    assert 0 < value(samples, "inter_token_seconds_sum") < value(samples, "request_seconds_sum")


def test_bytes_of_every_tenant_in_every_tier(keyed: Any) -> None:
    served, ann, bob, operator = keyed
    upload(served, ann, a=TEXTS[0], b=TEXTS[1])
    ready(served, ann, "a", "b")
    ask(served, bob, "none", {"text": TEXTS[2]})
    stranger = make(1)
    served.engine.store.put(key_of(stranger, "gone"), stranger)
    samples, tiers = scraped(served, operator), served.engine.store.tiers
    assert [tier.name for tier in tiers] == ["memory", "disk"]
    for tier in tiers:
        sizes = tier.sizes()
        for tenant in ("ann", "bob"):
            told = value(samples, "store_bytes", tier=tier.name, tenant=tenant)
            assert told == sizes[namespace(tenant)] > 0
        assert value(samples, "store_bytes", tier=tier.name, tenant=OTHERS) == sizes[namespace("gone")]
        assert sum(
            v for (n, labels), v in samples.items() if n == "kvquilt:store_bytes" and ("tier", tier.name) in labels
        ) == (tier.stats().bytes)
    assert all(("model_name", MODEL) in labels for _, labels in samples)
    named = {name for name, labels in samples if {("tenant", "ann"), ("tenant", "bob")} & labels}
    assert named == {"kvquilt:store_bytes"}
    assert not any(v == "a" or TEXTS[0] in v for _, labels in samples for _, v in labels), "no document is named"


def test_misses_by_tier_and_reason(keyed: Any) -> None:
    served, ann, _, operator = keyed
    ask(served, ann, "none", {"text": TEXTS[0]})
    before = scraped(served, operator)
    (row,) = served.engine.store.ls(namespace("ann"))
    path = served.engine.store.disk.files.path(row.key)
    served.engine.store.clear_memory()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 255
    path.write_bytes(raw)
    answer = ask(served, ann, "none", {"text": TEXTS[0]})
    after = scraped(served, operator)
    assert answer.kvquilt["documents"][0]["source"] == "compiled"

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("store_misses_total", tier="disk", reason="corrupt") == 1
    assert grown("store_misses_total", tier="memory", reason="absent") == 1
    assert grown("integrity_failures_total", tier="disk") == 1
    assert grown("fallback_total", reason="load_failed") == 1


class _Told:
    def __init__(self, **tiers: TierStats) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        return counted(MODEL, self._tiers)


def test_a_remote_tier_says_how_it_is() -> None:
    registry = CollectorRegistry()
    remote = TierStats(None, None, None, misses={"timeout": 2}, failures={"queue_full": 4}, waiting=3, breaker="open")
    registry.register(_Told(valkey=remote, memory=TierStats(1, 2, 3, pinned=5)))
    samples = read(generate_latest(registry).decode())
    assert value(samples, "store_writes_waiting", tier="valkey") == 3
    assert value(samples, "store_pinned", tier="memory") == 5
    assert all(("model_name", MODEL) in labels for _, labels in samples)
    states = {
        state: value(samples, "store_breaker", tier="valkey", state=state) for state in ("closed", "open", "half_open")
    }
    assert states == {"closed": 0, "open": 1, "half_open": 0}
    assert value(samples, "store_misses_total", tier="valkey", reason="timeout") == 2
    assert value(samples, "store_errors_total", tier="valkey", reason="queue_full") == 4
    assert not any(n == "kvquilt:store_breaker" and ("tier", "memory") in labels for n, labels in samples)


def test_without_keys_the_one_tenant_has_no_name() -> None:
    with serving() as served:
        ask(served, "", "none", {"text": TEXTS[0]})
        samples = scraped(served, "")
        assert value(samples, "store_bytes", tier="memory", tenant="") == served.engine.store.stats()["memory"].bytes
        served.rests()
