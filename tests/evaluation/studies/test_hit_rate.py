"""Hit rates without a model: caches against plain ones written out, traces against their law."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.studies.hit_rate import ARMS, simulate
from kvquilt.evaluation.studies.hit_rate_caches import POLICIES, BlockCache, SegmentCache
from kvquilt.evaluation.studies.hit_rate_model import SIZES, find_size
from kvquilt.evaluation.studies.hit_rate_plot import plot
from kvquilt.evaluation.studies.hit_rate_study import HitRateStudy, table
from kvquilt.evaluation.studies.hit_rate_trace import Trace, Traffic, draw
from kvquilt.store import Hit, MemoryTier
from tests.store.segments import key_of, make

SIZE = SIZES["llama-3.1-8b"]
SMALL = Traffic(
    requests=120, documents=20, per_request=3, systems=2, system_tokens=37, stamp_tokens=5, stamp_seconds=4.0,
    question_tokens=9, shortest=10, mean=30, longest=70,
)  # fmt: skip


def plain_blocks(prompts: list[list[tuple[int, int]]], capacity: int | None, block: int) -> list[int]:
    """Hits of a cache of single blocks, each named by every token up to its end."""
    held: dict[tuple[tuple[int, int], ...], tuple[int, int]] = {}
    hits = []
    for now, pieces in enumerate(prompts):
        tokens = [(piece, n) for piece, length in pieces for n in range(length)]
        names = [tuple(tokens[: (n + 1) * block]) for n in range(len(tokens) // block)]
        there = 0
        while there < min(len(names), (len(tokens) - 1) // block) and names[there] in held:
            there += 1
        hits.append(there * block)
        for depth, name in enumerate(names):
            held[name] = (now, -depth)
        while capacity is not None and len(held) * block > capacity:
            del held[min(held, key=held.__getitem__)]
    return hits


def test_prefixes_hit_as_single_blocks_do() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 40, 12).tolist()
    prompts = [[(int(p), lengths[p]) for p in random.integers(0, 12, random.integers(1, 6))] for _ in range(300)]
    prompts += [prompts[0], prompts[0]]
    for capacity in (None, 400, 160, 48):
        cache = BlockCache(capacity, block=8)
        # a run of one piece is a longer piece to single blocks and to us
        assert [cache.request(p) for p in prompts] == plain_blocks(prompts, capacity, 8), capacity
        assert capacity is None or cache.held <= capacity
    assert max(plain_blocks(prompts, 160, 8)) > 0, "nothing hits, so nothing was tested"


def test_segments_hit_as_they_do_in_the_memory_tier() -> None:
    """The tier itself, asked and filled in the order in which the store does it."""
    trace = draw(dataclasses.replace(SMALL, requests=300))
    segments = [make(100 * n, int(tokens)) for n, tokens in enumerate(trace.lengths)]
    keys, each = [key_of(segment) for segment in segments], segments[0].nbytes // segments[0].tokens
    capacity = int(trace.lengths.sum() * 0.35)
    tier, cache = MemoryTier(capacity * each), SegmentCache(POLICIES["store"], capacity, each)
    total = 0
    for documents in trace.documents.tolist():
        there = [isinstance(tier.get(keys[n], segments[n].ids), Hit) for n in documents]
        missing = [n for n, hit in zip(documents, there, strict=True) if not hit]
        with ExitStack() as pins:
            for n in documents:
                pins.enter_context(tier.pin(keys[n]))
            for n in sorted(missing, key=trace.lengths.__getitem__):
                tier.put(keys[n], segments[n])
        assert cache.request([(n, int(trace.lengths[n]), 1.0) for n in documents]) == there
        total += sum(there)
    assert cache.evictions == tier.stats().evictions > 20
    assert cache.held * each == tier.stats().bytes
    assert 0 < total < 900


def requested(policy: str, wanted: str, capacity: int = 3) -> str:
    """Which of single requests hit: ``h`` and ``.``."""
    cache = SegmentCache(POLICIES[policy], capacity)
    return "".join("h" if cache.request([(ord(c), 1, 1.0)])[0] else "." for c in wanted)


def test_what_goes_first() -> None:
    assert requested("lru", "abcaadb") == "...hh.."
    # b was used twice, c once: the newcomer takes the place of c
    assert requested("lfu", "aabbcdab") == ".h.h..hh"
    # three old uses keep a place for ever without ageing, and lose it with
    tail = "bcdefbcdefbcdef"
    assert requested("lfu", f"aaaa{tail}a")[-1] == "h"
    assert requested("store", f"aaaa{tail}a")[-1] == "."
    assert requested("store", "aabbcdab") == ".h.h..hh"


def test_per_object_a_short_segment_is_worth_more() -> None:
    def short_one_stays(policy: str) -> bool:
        cache = SegmentCache(POLICIES[policy], 10)
        cache.request([(1, 2, 4.0)])
        cache.request([(2, 8, 64.0)])
        cache.request([(3, 2, 4.0)])  # one must go: the short first, or the long second
        return cache.request([(1, 2, 4.0)])[0]

    assert short_one_stays("gdsf")
    assert not short_one_stays("gdsf-work")
    assert not short_one_stays("store")


def test_counts_that_survive_eviction() -> None:
    # c took the place of a, which comes back with its old uses and stays when d comes
    assert requested("lfu", "aabbbcccada", capacity=2) == ".h.hh.hh..h"
    assert requested("store", "aabbbcccada", capacity=2) == ".h.hh.hh..."


def test_what_does_not_fit_is_not_kept_and_costs_nobody_a_place() -> None:
    cache = SegmentCache(POLICIES["lru"], 10)
    cache.request([(1, 6, 1.0)])
    assert cache.request([(2, 11, 1.0)]) == [False]
    assert cache.request([(1, 6, 1.0), (3, 5, 1.0)]) == [True, False]  # the first is held meanwhile
    assert (cache.refused, cache.evictions, cache.held) == (2, 0, 6)


def test_documents_are_asked_for_by_their_law_and_never_twice() -> None:
    many = dataclasses.replace(SMALL, requests=4000, per_request=1, documents=300, exponent=1.0)
    for documents in (200, 300):  # both ways of drawing
        trace = draw(dataclasses.replace(many, documents=documents))
        counts = np.sort(np.bincount(trace.documents[:, 0], minlength=documents))[::-1]
        harmonic = (1 / np.arange(1, documents + 1)).sum()
        assert counts[0] / 4000 == pytest.approx(1 / harmonic, rel=0.1)
        assert counts[:10].sum() / 4000 == pytest.approx((1 / np.arange(1, 11)).sum() / harmonic, rel=0.05)
        several = draw(dataclasses.replace(many, documents=documents, per_request=8))
        assert (np.diff(np.sort(several.documents, 1)) > 0).all()
    even = draw(dataclasses.replace(many, exponent=0.0, documents=10)).documents
    assert np.bincount(even[:, 0]).min() > 300


def test_same_seed_same_trace_and_one_thing_changes_at_a_time() -> None:
    one, same, other = draw(SMALL), draw(SMALL), draw(dataclasses.replace(SMALL, exponent=0.5))
    for name in ("times", "systems", "stamps", "documents", "lengths"):
        assert (getattr(one, name) == getattr(same, name)).all()
    assert (one.times == other.times).all()
    assert (one.lengths == other.lengths).all()
    assert (one.documents != other.documents).any()
    assert (draw(dataclasses.replace(SMALL, seed=1)).documents != one.documents).any()


def test_two_documents_always_stand_alike_in_a_stable_order() -> None:
    def pairs(trace: Trace) -> set[tuple[int, int]]:
        return {(a, b) for row in trace.documents.tolist() for n, a in enumerate(row) for b in row[n + 1 :]}

    stable = pairs(draw(dataclasses.replace(SMALL, order="stable")))
    assert not {(b, a) for a, b in stable} & stable
    shuffled = pairs(draw(SMALL))
    assert {(b, a) for a, b in shuffled} & shuffled


def test_fame_moves_on() -> None:
    drifting = dataclasses.replace(SMALL, requests=2000, documents=100, exponent=1.5, drift_every=100)
    first, last = (np.bincount(part.ravel(), minlength=100) for part in np.split(draw(drifting).documents, [200])[:2])
    assert last.argmax() != first.argmax() or np.corrcoef(first, last)[0, 1] < 0.9
    still = draw(dataclasses.replace(drifting, drift_every=0)).documents
    first, last = (np.bincount(part.ravel(), minlength=100) for part in np.split(still, [200])[:2])
    assert np.corrcoef(first, last)[0, 1] > 0.9


def test_arrivals_are_poisson_and_a_tick_is_shared() -> None:
    trace = draw(dataclasses.replace(SMALL, requests=4000, rate=5.0, stamp_seconds=10.0))
    gaps = np.diff(trace.times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.1)
    assert 4000 / len(np.unique(trace.stamps)) == pytest.approx(50, rel=0.1)


def one_trace(documents: list[list[int]], stamps: list[int], stamp: int = 16) -> Trace:
    n = len(documents)
    numbers = np.array
    return Trace(
        np.arange(n, dtype=np.float64), numbers([0] * n), numbers(stamps), numbers(documents), numbers([32, 48]),
        numbers([16]), numbers([stamp] * n), numbers([16] * n),
    )  # fmt: skip


def test_hits_of_two_requests_by_hand() -> None:
    """System 16, stamp 16, documents 32 and 48, question 16: a prompt of 128 tokens."""
    other_stamp = one_trace([[0, 1], [0, 1]], [0, 1])
    assert simulate(other_stamp, "prefix", 1000, SIZE).hits.tolist() == [0, 16]
    assert simulate(other_stamp, "segments:lru", 1000, SIZE).hits.tolist() == [0, 96]
    same_stamp = one_trace([[0, 1], [0, 1]], [0, 0])
    found = simulate(same_stamp, "prefix", 1000, SIZE)
    assert found.hits.tolist() == [0, 112]
    assert found.document_hits.tolist() == [0, 80]
    swapped = simulate(one_trace([[0, 1], [1, 0]], [0, 0]), "prefix", 1000, SIZE)
    assert swapped.hits.tolist() == [0, 32]
    assert swapped.document_hits.tolist() == [0, 0]
    whole = simulate(other_stamp, "segments:lru", 1000, SIZE)
    assert whole.document_hits.tolist() == [0, 80]
    assert whole.flops[1] == SIZE.flops(0, 128)
    # rows 0..15 and 32..111: the stamp and the question are computed
    assert whole.saved[1] == pytest.approx(SIZE.flops(0, 16) + SIZE.flops(32, 112))
    told = whole.as_dict(SIZE.bytes_per_token)
    assert told["token_hit_rate"] == pytest.approx(96 / 256, abs=1e-6)
    assert told["recomputed_tokens"] == 256 - 96
    assert told["bytes_read"] == 96 * 131072


def test_without_a_system_text_the_stamp_still_stands_before_the_documents() -> None:
    trace = dataclasses.replace(one_trace([[0, 1], [0, 1]], [0, 1]), system_lengths=np.array([0]))
    found = simulate(trace, "segments:lru", 1000, SIZE)
    assert found.hits.tolist() == [0, 80]
    assert found.saved[1] == pytest.approx(SIZE.flops(16, 96))


def test_rates_are_ordered_as_they_must_be() -> None:
    trace = draw(dataclasses.replace(SMALL, requests=800))
    capacity = int(trace.lengths.sum() * 0.3)
    rates = {arm: simulate(trace, arm, capacity, SIZE).token_hit_rate for arm in ARMS}
    assert rates["prefix"] <= rates["prefix:unbounded"] < rates["segments:lru"]
    assert all(rate < rates["segments:unbounded"] for arm, rate in rates.items() if arm != "segments:unbounded")
    roomy = {arm: simulate(trace, arm, 10**9, SIZE).token_hit_rate for arm in ARMS}
    assert len({roomy[f"segments:{name}"] for name in (*POLICIES, "unbounded")}) == 1
    assert roomy["prefix"] == rates["prefix:unbounded"]


def test_sizes_of_known_models_and_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"llama-3.1-8b": 131072, "mistral-7b": 131072, "qwen3-8b": 147456, "qwen3-4b": 147456}
    assert {name: SIZES[name].bytes_per_token for name in known} == known
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = find_size(str(tmp_path))
    assert size.bytes_per_token == 2 * 3 * 2 * 16 * 2
    monkeypatch.chdir(tmp_path)
    assert find_size(".").name == tmp_path.name
    # layers x (q, k, v, o + three matrices) x 2, and attention of one row to itself
    assert size.flops(0, 1) == 2 * 3 * (64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 96) + 4 * 3 * 4 * 16
    assert size.flops(0, 9) == pytest.approx(size.flops(0, 4) + size.flops(4, 9))
    del config["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="intermediate_size"):
        find_size(str(tmp_path))
    with pytest.raises(InputError, match=r"llama-3\.1-8b"):
        find_size("llama-3.1-8")


def test_a_study_is_every_combination_and_a_picture() -> None:
    study = HitRateStudy(
        SMALL, SIZE, (0.5, 1.0), (20, 30), capacities=(40 * SIZE.bytes_per_token * 10,), arms=("prefix", "segments:lru")
    )
    seen: list[tuple[int, int]] = []
    result = json.loads(json.dumps(study.run(lambda done, total: seen.append((done, total)))))
    assert [(row["documents"], row["exponent"]) for row in result["rows"]] == [
        (20, 0.5), (20, 1.0), (30, 0.5), (30, 1.0),
    ]  # fmt: skip
    assert seen == [(n, 4) for n in (1, 2, 3, 4)]
    head, lines = table(result["rows"])
    assert head == ("exponent", "documents", "prefix", "segments:lru")
    assert len(lines) == 4
    assert plot(result).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"exponent": -1.0}, "exponent"),
        ({"per_request": 21}, "per_request"),
        ({"order": "shufled"}, "order"),
        ({"rate": 0.0}, "rate"),
        ({"longest": 20}, "longest"),
    ],
)
def test_traffic_that_cannot_be_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        dataclasses.replace(SMALL, **change)


def test_caches_that_cannot_be_are_refused() -> None:
    trace = draw(SMALL)
    with pytest.raises(InputError, match="segments:lru"):
        simulate(trace, "prefix:lru", 1000, SIZE)
    with pytest.raises(InputError, match="store"):
        simulate(trace, "segments:stor", 1000, SIZE)
    with pytest.raises(InputError, match="shortest has"):
        simulate(trace, "prefix", 5, SIZE)
