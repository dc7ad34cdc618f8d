"""Several requests in one forward: each gets what it gets alone, of every family, whatever the others are."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kvquilt.errors import IntegrityError, NumericsError
from kvquilt.model.batch import forward_together
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts
from kvquilt.model.rows import RowPlan, SlotView
from kvquilt.model.slots import SlotCache
from tests.models import FAMILIES, tiny

pytestmark = pytest.mark.usefixtures("nan_slots")
LENGTHS = (5, 40, 1, 17)  # of what stands before; 40 is longer than the windows of the families that have one


def stand(model: LanguageModel, tokens: int, room: int = 8) -> SlotCache:
    cache = model.pool.acquire(tokens + room)
    ids = torch.randint(3, model.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    model.forward(ids, RowPlan(torch.arange(tokens), tokens), cache)
    return cache


def alone(model: LanguageModel, cache: SlotCache, ids: list[int]) -> torch.Tensor:
    """And as it was afterwards."""
    filled, view = cache.filled, cache.view
    logits = model.forward(torch.tensor([ids]), cache.tail(len(ids)), cache, len(ids))[0]
    cache.filled, cache.view = filled, view
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("said", [[[7], [8], [9], [10]], [[7, 8, 9], [10], [11, 12], [13, 14, 15, 16]]])
def test_each_gets_what_it_gets_alone(family: str, said: list[list[int]]) -> None:
    model = tiny(family)
    caches = [stand(model, tokens) for tokens in LENGTHS]
    wanted = [alone(model, cache, ids) for cache, ids in zip(caches, said, strict=True)]
    found = forward_together(model, said, caches)
    assert [len(each) for each in found] == [len(ids) for ids in said]
    for mine, other in zip(found, wanted, strict=True):
        assert torch.allclose(mine, other, atol=2e-4, rtol=1e-4)
    assert [cache.filled for cache in caches] == [n + len(ids) for n, ids in zip(LENGTHS, said, strict=True)]
    # and what they wrote is what the next step reads
    after = forward_together(model, [[21]] * len(caches), caches)
    for n, (ids, mine) in enumerate(zip(said, after, strict=True)):
        fresh = stand(model, LENGTHS[n])
        alone(model, fresh, ids)
        fresh.filled += len(ids)
        assert torch.allclose(mine, alone(model, fresh, [21]), atol=2e-4, rtol=1e-4)
        model.pool.release(fresh)
    for cache in caches:
        model.pool.release(cache)


def test_slots_that_stand_elsewhere() -> None:
    """One of them dropped slots, so its next token's position is not its slot's number."""
    model = tiny()
    plain, short = stand(model, 6), stand(model, 9)
    short.view = SlotView(torch.tensor([0, 1, 2, 3, 4, 5, 20, 21, 22]), 14)
    wanted = [alone(model, plain, [5, 6]), alone(model, short, [5, 6])]
    found = forward_together(model, [[5, 6], [5, 6]], [plain, short])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, wanted, strict=True))
    assert (plain.view, short.next_position) == (None, 25)
    assert not torch.allclose(*found, atol=1e-2), "both see the same, so nothing is tested"
    for cache in (plain, short):
        model.pool.release(cache)


def test_rows_are_counted_for_each() -> None:
    model = tiny()
    caches, counters, single = [stand(model, 4), stand(model, 9)], [RowCounter(), RowCounter()], RowCounter()
    forward_together(model, [[5, 6, 7], [8]], caches, counters)
    model.forward(torch.tensor([[9]]), caches[1].tail(1), caches[1], 1, single)
    layers = model.capability.layers
    assert [c.rows for c in counters] == [3, 1]
    assert [c.token_layers for c in counters] == [3 * layers, layers]
    assert (single.pairs, counters[1].pairs) == (11 * layers, 10 * layers)
    assert counters[0].pairs == (5 + 6 + 7) * layers
    for cache in caches:
        model.pool.release(cache)


def test_one_is_a_plain_forward() -> None:
    model = tiny()
    cache = stand(model, 4)
    wanted = alone(model, cache, [5])
    assert torch.equal(forward_together(model, [[5]], [cache])[0], wanted)
    model.pool.release(cache)


def test_caches_are_free_as_soon_as_nobody_has_them() -> None:
    """Not at the next garbage collection: each holds megabytes."""
    model = tiny()
    gc.collect()
    gc.disable()
    try:
        caches = [stand(model, 4), stand(model, 9)]
        forward_together(model, [[5, 6], [7]], caches)
        watched = [weakref.ref(cache.slot_keys) for cache in caches]
        for cache in caches:
            model.pool.release(cache)
        del cache, caches
        model.pool.release(model.pool.acquire(4096))  # the pool keeps one: this one
        assert [each() for each in watched] == [None, None]
    finally:
        gc.enable()


def test_what_cannot_go_together() -> None:
    model = tiny()
    one, other = stand(model, 4), stand(model, 4)
    with pytest.raises(IntegrityError, match="different caches"):
        forward_together(model, [[5], [5]], [one, one])
    other.parts = Parts(soft=torch.zeros(1, 64))
    with pytest.raises(IntegrityError, match="same trained parts"):
        forward_together(model, [[5], [5]], [one, other])
    assert (one.filled, other.filled) == (4, 4)
    for cache in (one, other):
        model.pool.release(cache)


def test_a_failure_leaves_all_of_them_where_they_were() -> None:
    model = tiny()
    sound, broken = stand(model, 4), stand(model, 4)
    broken.slot_values[:, :, :, 2] = torch.nan
    with pytest.raises(NumericsError):
        forward_together(model, [[5], [5]], [sound, broken])
    assert (sound.filled, broken.filled) == (4, 4)
    for cache in (sound, broken):
        model.pool.release(cache)
