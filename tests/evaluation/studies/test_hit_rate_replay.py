"""The simulator against the engine's own reader and memory tier."""

from __future__ import annotations

import dataclasses

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.studies.hit_rate_replay import SMALL, replay
from tests.engines import at_rest, make_engine


@pytest.mark.parametrize(("seed", "share"), [(0, 0.4), (1, 0.25)])
def test_simulated_and_real_hit_rates_agree(seed: int, share: float) -> None:
    traffic = dataclasses.replace(SMALL, seed=seed, shortest=8, mean=16, longest=40)
    with make_engine() as engine:
        lent = engine.model.pool.lent
        seen: list[int] = []
        found = replay(engine, traffic, share, lambda done, total: seen.append(done))
        at_rest(engine, lent=lent)
        assert not engine.store.ls(), "the engine's own store is not touched"
    assert found.apart < 1, "one point"
    assert found.evictions == found.real_evictions > 10
    assert 0.1 < found.real < 0.9
    assert found.capacity == int(share * found.segments)
    assert seen == list(range(1, 41))


def test_a_share_that_cannot_be_is_refused() -> None:
    with make_engine() as engine, pytest.raises(InputError, match="share"):
        replay(engine, SMALL, 0.0)
