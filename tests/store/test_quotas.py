"""Quotas whatever happens: random puts of two tenants, several threads, and the plan of who gives way."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.identity import namespace
from kvquilt.store import DiskTier, Failure, MemoryTier, Quotas, Store, Stored
from tests.store.segments import key_of, make, same

A, B = namespace("a"), namespace("b")
# tenant, number of the segment, tokens of it, and whether it is put, used or removed
STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 9), st.integers(1, 12), st.sampled_from(("put", "use", "remove"))),
    max_size=60,
)


def _within(tier: MemoryTier | DiskTier, steps: list[tuple[str, int, int, str]], quotas: Quotas) -> None:
    """Whatever one tenant does changes nothing of the other's, and nobody has more than its quota."""
    tier.quote(lambda: quotas)
    for tenant, number, tokens, what in steps:
        other = namespace("b" if tenant == "a" else "a")
        before = set(tier.keys(other))
        segment = make(number, tokens)
        key = key_of(segment, tenant)
        if what == "put":
            answer = tier.put(key, segment)
            assert isinstance(answer, Stored) == (key in set(tier.keys())), "what is refused was never there"
            assert isinstance(answer, Stored) or answer.reason == "over_quota"
        elif what == "use":
            tier.get(key, segment.ids)
        else:
            tier.remove(key)
        assert set(tier.keys(other)) == before
        for space, quota in quotas.bytes.items():
            assert tier.sizes().get(space, 0) <= quota
    tier.check_integrity()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(STEPS, st.integers(0, 6000), st.integers(0, 6000))
def test_random_puts_never_evict_another_tenant_s_in_memory(
    steps: list[tuple[str, int, int, str]], first: int, second: int
) -> None:
    _within(MemoryTier(12000), steps, Quotas({A: first, B: second}))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(STEPS, st.integers(0, 20000), st.integers(0, 20000))
def test_random_puts_never_evict_another_tenant_s_on_disk(
    steps: list[tuple[str, int, int, str]], first: int, second: int
) -> None:
    with TemporaryDirectory() as folder, closing(DiskTier(Path(folder), 40000)) as tier:
        _within(tier, steps, Quotas({A: first, B: second}))


def test_a_flood_from_many_threads_evicts_nothing_of_another(tmp_path: Path) -> None:
    with closing(DiskTier(tmp_path / "sizing")) as sizing:
        answer = sizing.put(key_of(make(1)), make(1))
    assert isinstance(answer, Stored)
    size, kept = answer.bytes, [make(number) for number in range(1, 6)]
    with Store.open(tmp_path / "store", size * 10, size * 10) as store:
        quotas = Quotas({A: size * 5, B: size * 5})
        store.quote(lambda: quotas)
        for each in kept:
            store.put(key_of(each, "a"), each)

        def flood(seed: int) -> None:
            draw = Random(seed)
            for _ in range(60):
                segment = make(draw.randrange(100, 200))
                with store.fetch([(key_of(segment, "b"), segment.ids)], lambda _, made=segment: [(0, made)]) as held:
                    assert same(held[0].segment, segment)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(flood, range(6)))
        for tier in (store.memory, store.disk):
            assert tier is not None
            assert set(tier.keys(A)) == {key_of(each, "a") for each in kept}
            assert tier.sizes()[B] <= size * 5
        store.check_integrity()


def test_without_quotas_all_compete() -> None:
    tier = MemoryTier(make(1).nbytes * 3)
    for number, tenant in ((1, "a"), (2, "b"), (3, "a")):
        tier.put(key_of(make(number), tenant), make(number))
    tier.touch(key_of(make(1), "a"))
    left = []
    for number in (4, 5, 6):  # the last finds what was used twice no more useful than newcomers
        tier.put(key_of(make(number), "b"), make(number))
        left.append([row.key.namespace for row in tier.rows()])
    assert left == [[A, A, B], [A, B, B], [B, B, B]]


def test_an_index_that_knew_no_quotas_learns_of_them(tmp_path: Path) -> None:
    with closing(DiskTier(tmp_path)) as tier:
        for number in range(1, 4):
            tier.put(key_of(make(number), "a"), make(number))
        size = (tier.stats().bytes or 0) // 3
    with closing(sqlite3.connect(tmp_path / "v1" / "index.sqlite")) as index:
        index.execute("DROP TABLE clocks")
        index.execute("DROP INDEX by_namespace")
        index.commit()
    with closing(DiskTier(tmp_path, size * 4)) as tier:
        quotas = Quotas({A: size * 3, B: size})
        tier.quote(lambda: quotas)
        for number in range(4, 7):
            assert isinstance(tier.put(key_of(make(number), "a"), make(number)), Stored)
        assert {key_of(make(number), "a") for number in (4, 5, 6)} == set(tier.keys())
        tier.check_integrity()


Plan = dict[str, int] | None


@pytest.mark.parametrize(
    ("taken", "held", "more", "budget", "plan"),
    [
        ({}, {}, 5, 100, {}),
        ({A: 10}, {}, 5, 100, {A: 5}),
        ({A: 10}, {A: 6}, 5, 100, None),
        ({A: 10, B: 10}, {}, 0, 20, {}),
        ({A: 10, B: 30}, {}, 0, 25, {B: 15}),  # it is 20 over
        ({A: 5, B: 30}, {B: 30}, 5, 35, {A: 5}),  # what is held of others does not go
        ({A: 5, B: 30}, {B: 30}, 5, 30, None),
        ({A: 5, B: 30, "gone": 7}, {}, 5, 30, {B: 17}),  # by how much they are over
        ({A: 5, B: 12, "gone": 7}, {}, 5, 20, {"gone": 7, B: 2}),
        ({A: 3, B: 40}, {B: 40}, 5, 42, None),
        ({A: 12}, {}, -2, None, {}),
    ],
)
def test_who_gives_way(taken: dict[str, int], held: dict[str, int], more: int, budget: int | None, plan: Plan) -> None:
    free = {space: size - held.get(space, 0) for space, size in taken.items()}
    assert Quotas({A: 10, B: 10}).relief(taken, free, A, more, budget) == plan


def test_a_tenant_that_is_gone_keeps_nothing_new(tmp_path: Path) -> None:
    tier = MemoryTier(1 << 20)
    quotas = [Quotas({A: 1 << 19})]
    tier.quote(lambda: quotas[0])
    assert isinstance(tier.put(key_of(make(1), "a"), make(1)), Stored)
    quotas[0] = Quotas({})
    assert isinstance(tier.put(key_of(make(2), "a"), make(2)), Failure)
