"""Rows of a prompt that ride along with steps of streams: they change neither, and hold nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from kvquilt.errors import NumericsError
from kvquilt.model import batch
from kvquilt.model import steps as stepping
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.pace import Pace
from kvquilt.model.parts import PLAIN
from kvquilt.model.rides import Part, Ride, Rides
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.model.steps import Steps
from kvquilt.model.turns import UnwantedError
from tests.engines import QUESTION, at_rest, documents, make_engine
from tests.models import FAMILIES, tiny

ROWS, STEPS = 40, 2000


@pytest.fixture
def ridden(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows went along with each step; seven at once, and nobody loses patience."""
    seen: list[int] = []
    together, along = batch.forward_together, Rides.along

    def counted(*given: object) -> list[torch.Tensor]:
        beside = given[4]
        assert beside is None or isinstance(beside, Part)
        seen.append(0 if beside is None else len(beside.ids))
        return together(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(stepping, "forward_together", counted)
    monkeypatch.setattr(Pace, "riding", lambda *_: 7)
    monkeypatch.setattr(Pace, "step_took", lambda *_: None)
    monkeypatch.setattr(Rides, "along", lambda self, ride, patience: along(self, ride, 30.0))
    return seen


def ids_of(model: LanguageModel, count: int) -> torch.Tensor:
    return torch.randint(3, model.vocabulary, (1, count), generator=torch.Generator().manual_seed(count))


@contextmanager
def decoding(model: LanguageModel) -> Iterator[list[torch.Tensor]]:
    """A stream that takes step after step inside the block; its logits afterwards."""
    over, found = threading.Event(), []
    cache = model.pool.acquire(STEPS + 5)
    model.forward(ids_of(model, 5), RowPlan(torch.arange(5), 5), cache)
    steps = Steps(model)

    def run() -> None:
        with steps.stream(cache):
            begun.set()
            while not over.is_set() and len(found) < STEPS:
                found.append(steps.step(cache, 7, RowCounter()))

    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run)
        begun.wait(30)
        try:
            yield found
        finally:
            over.set()
            done.result(60)
            model.pool.release(cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_rides_along_reads_what_it_reads_alone(family: str, ridden: list[int]) -> None:
    model = tiny(family)
    ids = ids_of(model, ROWS)
    alone, along = model.pool.acquire(ROWS), model.pool.acquire(ROWS)
    plan = RowPlan(torch.arange(ROWS), ROWS)
    truth = model.forward(ids, plan, alone, 3)
    with decoding(model) as streamed:
        counter = RowCounter()
        found = model.portions(ids, RowPlan(torch.arange(ROWS), ROWS), along, 3, counter)
    assert sum(ridden) == ROWS - 3
    assert max(ridden) == 7
    assert torch.allclose(found, truth, atol=1e-4)
    assert torch.allclose(along.slot_keys[..., :ROWS, :], alone.slot_keys[..., :ROWS, :], atol=1e-4)
    assert (along.filled, counter.rows) == (ROWS, ROWS)
    assert counter.token_layers == ROWS * model.capability.layers
    assert counter.pairs == plan.pairs
    with decoding(model) as quiet:
        while len(quiet) < len(streamed):
            pass
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(streamed, quiet, strict=False))
    for cache in (alone, along):
        model.pool.release(cache)


@pytest.mark.usefixtures("ridden")
@pytest.mark.parametrize("method", ["full", "none", "epic:k=16", "cacheblend:1000000", "sempic"])
def test_answers_of_prompts_that_ride_are_those_of_prompts_alone(method: str) -> None:
    docs = documents(5, 120)
    asked = [[docs[n], docs[n + 1], docs[(n + 3) % 5]] for n in range(4)]
    with make_engine(trained=True) as engine:
        truth = [engine.ask(QUESTION, d, method=method, max_new_tokens=12).token_ids for d in asked]
        engine.store.clear_memory()
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda d: engine.ask(QUESTION, d, method=method, max_new_tokens=12).token_ids, asked)
            assert list(answers) == truth
        at_rest(engine, conversations=1)


def riding(model: LanguageModel, unwanted: Callable[[], bool] = lambda: False) -> tuple[Ride, SlotCache]:
    cache = model.pool.acquire(ROWS)
    whole = Part(ids_of(model, ROWS)[0], RowPlan(torch.arange(ROWS), ROWS), cache, RowCounter())
    return Ride(whole, ROWS, unwanted), cache


def test_nobody_waits_for_steps_that_do_not_come() -> None:
    model = tiny()
    ride, cache = riding(model)
    model.rides.along(ride, 0.0)
    assert ride.gone == 0
    with model.turns.streaming(1):  # one that never asks
        found = model.portions(ride.whole.ids[None], ride.whole.plan, cache)
    assert torch.isfinite(found).all()
    with model.rides.boarding(PLAIN, 7) as part:
        assert part is None, "who gave up does not ride"
    model.pool.release(cache)


def test_rows_go_another_time_if_the_forward_that_took_them_fails() -> None:
    rides, model = Rides(), tiny()
    ride, cache = riding(model)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(rides.along, ride, 30.0)
        while not ride.gone:
            with rides.boarding(PLAIN, 7) as part:
                assert part is None or part.plan.rows.tolist() == list(range(7))
        with pytest.raises(NumericsError), rides.boarding(PLAIN, 7):
            raise NumericsError("a stream's")
        with rides.boarding(PLAIN, 100) as part:
            assert part is not None
            assert part.plan.rows.tolist() == list(range(7, ROWS))
        waits.result(30)
    assert ride.gone == ROWS
    model.pool.release(cache)


def test_rows_ride_only_over_the_parts_that_they_are_read_with() -> None:
    rides, model = Rides(), tiny()
    ride, cache = riding(model)
    cache.parts = type(PLAIN)()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(rides.along, ride, 30.0)
        while not rides._waiting:
            pass
        with rides.boarding(PLAIN, 7) as part:
            assert part is None
        with rides.boarding(cache.parts, ROWS) as part:
            assert part is not None
        waits.result(30)
    cache.parts = PLAIN
    model.pool.release(cache)


@pytest.mark.parametrize("why", ["other parts", "no room"])
def test_steps_that_can_take_nobody_along_hold_nobody(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    ride, cache = riding(model)
    if why == "other parts":
        cache.parts = type(PLAIN)()
    else:
        monkeypatch.setattr(Pace, "riding", lambda *_: 0)
    with decoding(model) as streamed:
        found = model.portions(ride.whole.ids[None], ride.whole.plan, cache)
        assert len(streamed) < STEPS, "it waited until nobody streamed any more"
    assert torch.isfinite(found).all()
    cache.parts = PLAIN
    model.pool.release(cache)


def test_two_prompts_take_turns() -> None:
    rides, model = Rides(), tiny()
    (first, one), (second, two) = riding(model), riding(model)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(rides.along, ride, 30.0) for ride in (first, second)]
        while len(rides._waiting) < 2:
            pass
        for _ in range(4):
            with rides.boarding(PLAIN, 5):
                pass
        assert (first.gone, second.gone) == (10, 10)
        while first.gone + second.gone < 2 * ROWS:
            with rides.boarding(PLAIN, 50):
                pass
        assert [each.result(30) for each in waits] == [None, None]
    for cache in (one, two):
        model.pool.release(cache)


def test_who_is_no_longer_wanted_gets_off(ridden: list[int]) -> None:
    model = tiny()
    ride, cache = riding(model)
    with decoding(model), pytest.raises(UnwantedError), model.turns.wanted(lambda: sum(ridden) > 7):
        model.portions(ride.whole.ids[None], ride.whole.plan, cache)
    assert 7 < sum(ridden) < ROWS
    assert not model.rides._waiting
    model.pool.release(cache)


def test_who_holds_the_turn_does_not_wait_for_steps_that_cannot_come(ridden: list[int]) -> None:
    model = tiny()
    ride, cache = riding(model)
    with decoding(model), model.alone():
        before = sum(ridden)
        model.portions(ride.whole.ids[None], ride.whole.plan, cache)
        assert sum(ridden) == before
    model.pool.release(cache)
