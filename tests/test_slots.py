"""The slot pool knows what it lent: what comes back twice, from elsewhere or not at all is found out."""

from __future__ import annotations

import gc

import pytest
import torch

from kvquilt.errors import IntegrityError
from kvquilt.model.slots import PoolStats, SlotPool


def make() -> SlotPool:
    return SlotPool(2, 2, 8, 4, torch.float32, torch.device("cpu"))


def test_stats_follow_lending_and_giving_back() -> None:
    pool = make()
    assert pool.stats() == PoolStats(0, 0, 0)
    one, batch = pool.acquire(10), pool.acquire(10, batch=3)
    assert one.nbytes == 2 * 2 * 64 * (8 + 4) * 4
    assert pool.stats() == PoolStats(2, 4 * one.nbytes, 0)
    pool.release(batch)
    assert pool.stats() == PoolStats(1, one.nbytes, 0), "a batch is not kept"
    pool.release(one)
    assert pool.stats() == PoolStats(0, 0, one.nbytes)
    assert pool.acquire(20) is one
    assert (pool.lent, pool.stats().spare_bytes) == (1, 0)
    pool.check_integrity()


def test_a_cache_that_grew_counts_once() -> None:
    pool = make()
    larger = pool.grow(pool.acquire(10), 500)
    assert pool.lent == 1
    pool.check_integrity()
    pool.release(larger)
    assert pool.lent == 0


def test_a_cache_given_back_twice_or_to_another_pool_is_refused() -> None:
    pool, other = make(), make()
    cache = pool.acquire(10)
    with pytest.raises(IntegrityError, match="not lent"):
        other.release(cache)
    pool.release(cache)
    with pytest.raises(IntegrityError, match="not lent"):
        pool.release(cache)
    assert pool.lent == other.lent == 0
    for each in (pool, other):
        each.check_integrity()
    assert pool.acquire(10) is not pool.acquire(10), "one buffer never serves two requests"


def test_a_block_gives_back_also_when_it_fails() -> None:
    pool = make()

    def fail_inside() -> None:
        with pool.lend(10):
            assert pool.lent == 1
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail_inside()
    assert pool.lent == 0


def test_an_allocation_that_fails_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory")

    pool = make()
    monkeypatch.setattr(torch, "empty", refused)
    with pytest.raises(RuntimeError, match="no memory"):
        pool.acquire(10)
    assert pool.lent == 0


def test_a_cache_that_is_dropped_is_missed_and_not_held() -> None:
    pool = make()
    pool.acquire(10)
    gc.collect()
    assert pool.stats() == PoolStats(1, 0, 0)
    with pytest.raises(IntegrityError, match="1 lent caches were dropped"):
        pool.check_integrity()


def test_more_filled_slots_than_there_are_is_found() -> None:
    pool = make()
    with pool.lend(10) as cache:
        cache.filled = 65
        with pytest.raises(IntegrityError, match="64 slots says 65"):
            pool.check_integrity()
