"""Fixtures for every test: one thread, and slots that start and end as NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Bit-equality needs a fixed number of threads; two of them also lose to any other busy process."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nan_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new, recycled, grown or released slot buffer is NaN: whoever reads a slot nobody wrote is found out."""
    from kvquilt.model.slots import SlotCache, SlotPool

    acquire, release = SlotPool.acquire, SlotPool.release

    def acquired(self: SlotPool, capacity: int, batch: int = 1) -> SlotCache:
        cache = acquire(self, capacity, batch)
        cache.slot_keys.fill_(float("nan"))
        cache.slot_values.fill_(float("nan"))
        return cache

    def released(self: SlotPool, cache: SlotCache) -> None:
        cache.slot_keys.fill_(float("nan"))
        cache.slot_values.fill_(float("nan"))
        release(self, cache)

    monkeypatch.setattr(SlotPool, "acquire", acquired)
    monkeypatch.setattr(SlotPool, "release", released)
