"""Rows of a prompt that ride along with steps of streams: they change neither, and hold nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from kvquilt.errors import NumericsError
from kvquilt.model import batch
from kvquilt.model import steps as stepping
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.pace import FIRST, Pace
from kvquilt.model.parts import PLAIN, Parts
from kvquilt.model.rides import Part, Ride, Rides
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.model.steps import Steps
from kvquilt.model.turns import UnwantedError
from tests.engines import QUESTION, at_rest, documents, make_engine
from tests.models import FAMILIES, tiny
from tests.waiting import until

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
    monkeypatch.setattr(Pace, "portion", FIRST)  # models are shared, and so is what others measured of them
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
        until(lambda: not (not found and not done.done()))
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
        until(lambda: not (len(quiet) < len(streamed)))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(streamed, quiet, strict=False))
    for cache in (alone, along):
        model.pool.release(cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_that_ride_along_are_encoded_as_alone(family: str, ridden: list[int]) -> None:
    """Nothing of them needs logits, so all of their rows might go."""
    model = tiny(family)
    ids, counters = ids_of(model, ROWS), (RowCounter(), RowCounter())
    alone = model.encode(ids, None, counters[0])
    with decoding(model):
        along = model.encode(ids, None, counters[1])
    assert sum(ridden) >= ROWS - 7
    assert torch.allclose(along.slot_keys[..., :ROWS, :], alone.slot_keys[..., :ROWS, :], atol=1e-4)
    assert torch.allclose(along.slot_values[..., :ROWS, :], alone.slot_values[..., :ROWS, :], atol=1e-4)
    assert [(c.rows, c.token_layers) for c in counters] == [(ROWS, ROWS * model.capability.layers)] * 2
    for cache in (alone, along):
        model.pool.release(cache)


METHODS = ["full", "none", "epic:k=16", "cacheblend:1000000", "cache-craft", "link-tokens", "sempic"]


@pytest.mark.parametrize("method", METHODS)
def test_answers_of_prompts_that_ride_are_those_of_prompts_alone(method: str, ridden: list[int]) -> None:
    docs = documents(5, 120)
    asked = [[docs[n], docs[n + 1], docs[(n + 3) % 5]] for n in range(4)]
    with make_engine(trained=True) as engine:
        truth = [engine.ask(QUESTION, d, method=method, max_new_tokens=12).token_ids for d in asked]
        engine.store.clear_memory()
        ridden.clear()
        with decoding(engine.model), ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda d: engine.ask(QUESTION, d, method=method, max_new_tokens=12).token_ids, asked)
            assert list(answers) == truth
        assert any(ridden)
        at_rest(engine, conversations=1)


@pytest.mark.parametrize("method", METHODS)
def test_what_rides_is_accounted_as_alone(method: str, ridden: list[int]) -> None:
    """Compiling (one document at a time: batches are padded), reading, and a conversation that goes on."""
    docs = documents(3, 150)

    def told(beside: bool) -> list[object]:
        with make_engine(trained=True) as engine, decoding(engine.model) if beside else nullcontext():
            compiled = [engine.compile([each], gate=False, method=method).forward_tokens for each in docs[:2]]
            first = engine.ask(QUESTION, docs, method=method, max_new_tokens=6)
            second = first.follow_up("And then what does it do?", max_new_tokens=4)
        ledgers = [answer.ledger for answer in (first, second)]
        return [
            compiled, first.token_ids, second.token_ids,
            *[(ledger.tokens, ledger.forward_tokens, ledger.token_layers, ledger.flops) for ledger in ledgers],
        ]  # fmt: skip

    alone, rode = told(False), len(ridden)
    assert told(True) == alone
    assert any(ridden[rode:])


def riding(model: LanguageModel, unwanted: Callable[[], bool] = lambda: False) -> tuple[Ride, SlotCache]:
    cache = model.pool.acquire(ROWS)
    whole = Part(ids_of(model, ROWS)[0], RowPlan(torch.arange(ROWS), ROWS), cache, RowCounter())
    return Ride(whole, ROWS, unwanted), cache


def step_without(rides: Rides, parts: Parts = PLAIN) -> None:
    """Rows wait where steps over their parts have been seen."""
    with rides.boarding(parts, 7) as part:
        assert part is None


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
    step_without(rides, cache.parts)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(rides.along, ride, 30.0)
        until(lambda: bool(rides._waiting))
        with rides.boarding(PLAIN, 7) as part:
            assert part is not None
            assert part.plan.rows.tolist() == list(range(7))
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
    step_without(rides, cache.parts)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(rides.along, ride, 30.0)
        until(lambda: bool(rides._waiting))
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
    step_without(rides)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(rides.along, ride, 30.0) for ride in (first, second)]
        until(lambda: not (len(rides._waiting) < 2))
        for _ in range(4):
            with rides.boarding(PLAIN, 5):
                pass
        assert (first.gone, second.gone) == (10, 10)
        for _ in range(2):
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


@pytest.mark.parametrize("fault", [RuntimeError, MemoryError])
def test_what_a_prompt_s_rows_do_to_a_forward_is_no_stream_s_fault(
    fault: type[Exception], ridden: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    ride, cache = riding(model)
    together = stepping.forward_together

    failed = []

    def failing(*given: object) -> list[torch.Tensor]:
        if given[4] is not None:
            failed.append(given[4])
            raise fault
        return together(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(stepping, "forward_together", failing)
    with decoding(model) as streamed:
        found = model.portions(ride.whole.ids[None], ride.whole.plan, cache)
        before = len(streamed)
        until(lambda: not (len(streamed) < before + 3))
    assert torch.isfinite(found).all()
    assert sum(ridden) == 0, "nothing of it went well"
    assert len(failed) == 1, "what failed once is not tried again portion by portion"
    model.pool.release(cache)


def test_a_prompt_s_broken_rows_fail_it_alone(ridden: list[int]) -> None:
    model = tiny()
    ride, cache = riding(model)
    cache.slot_values[:, :, :, 0] = torch.nan
    plan = RowPlan(torch.arange(1, ROWS), ROWS)
    with decoding(model) as streamed, pytest.raises(NumericsError):
        model.portions(ride.whole.ids[None, 1:], plan, cache)
    assert sum(ridden) > 0
    assert all(torch.isfinite(each).all() for each in streamed)
    cache.slot_values.zero_()
    model.pool.release(cache)


def test_who_is_aboard_does_not_board_again() -> None:
    """Two engines over one model lead steps of their own."""
    rides, model = Rides(), tiny()
    ride, cache = riding(model)
    step_without(rides)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(rides.along, ride, 30.0)
        until(lambda: bool(rides._waiting))
        with rides.boarding(PLAIN, 7) as first, rides.boarding(PLAIN, 7) as second:
            assert (first is None, second) == (False, None)
        with rides.boarding(PLAIN, ROWS), rides.boarding(PLAIN, 7) as second:
            assert second is None
        assert ride.gone == ROWS
        with rides.boarding(PLAIN, 7) as nothing:
            assert nothing is None, "all have gone, whether it knows or not"
        waits.result(30)
    model.pool.release(cache)


def test_a_leader_that_is_interrupted_before_its_forward_leaves_nobody_aboard(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Part:
        raise KeyboardInterrupt

    rides, model = Rides(), tiny()
    ride, cache = riding(model)
    step_without(rides)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(rides.along, ride, 30.0)
        until(lambda: bool(rides._waiting))
        with monkeypatch.context() as patched:
            patched.setattr(Ride, "part", interrupted)
            with pytest.raises(KeyboardInterrupt), rides.boarding(PLAIN, 7):
                pass
        assert (ride.gone, ride.aboard) == (0, False)
        with rides.boarding(PLAIN, ROWS):
            pass
        waits.result(30)
    model.pool.release(cache)


def test_whoever_is_interrupted_again_and_again_waits_for_the_step_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    rides, model = Rides(), tiny()
    ride, cache = riding(model)
    step_without(rides)
    boarded, interrupts, over = threading.Event(), [], threading.Event()
    wait = rides._changed.wait

    def interrupted(seconds: float) -> None:
        if boarded.is_set() and len(interrupts) < 3:
            interrupts.append(1)
            raise KeyboardInterrupt
        wait(min(seconds, 0.001))

    monkeypatch.setattr(rides._changed, "wait", interrupted)

    def owner() -> None:
        try:
            rides.along(ride, 30.0)
        finally:
            over.set()

    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(owner)
        until(lambda: bool(rides._waiting))
        with rides.boarding(PLAIN, 7):
            boarded.set()
            until(lambda: not (len(interrupts) < 3))
            assert not over.is_set(), "it would have given back what is written to"
        assert isinstance(waits.exception(30), KeyboardInterrupt)
    assert not rides._waiting
    model.pool.release(cache)


def test_rows_over_parts_that_no_stream_has_do_not_wait(ridden: list[int]) -> None:
    """However patient: a writer's documents, beside streams of the plain reader."""
    model = tiny()
    with decoding(model) as streamed:
        made = model.encode(ids_of(model, ROWS), parts=type(PLAIN)())
        assert len(streamed) < STEPS, "it waited for them to end"
    assert sum(ridden) == 0
    model.pool.release(made)


def test_a_stream_that_ends_puts_nobody_off_while_others_go_on() -> None:
    model = tiny()
    ride, cache = riding(model)
    one, other = model.pool.acquire(8), model.pool.acquire(8)
    steps = Steps(model)
    with ThreadPoolExecutor(1) as pool, steps.stream(one):
        with steps.stream(other):
            step_without(model.rides)
            waits = pool.submit(model.rides.along, ride, 30.0)
            until(lambda: bool(model.rides._waiting))
        with model.rides.boarding(PLAIN, ROWS) as part:
            assert part is not None
        waits.result(30)
    assert ride.gone == ROWS
    for each in (cache, one, other):
        model.pool.release(each)


def test_segments_beside_streams_go_one_by_one_and_else_in_batches(ridden: list[int]) -> None:
    docs, made = documents(6, 30), []
    encode = LanguageModel.encode

    def counted(self: LanguageModel, ids: torch.Tensor, *given: Any, **options: Any) -> SlotCache:
        made.append(len(ids))
        return encode(self, ids, *given, **options)

    with pytest.MonkeyPatch.context() as patched, make_engine() as engine:
        patched.setattr(LanguageModel, "encode", counted)
        engine.compile(docs[:3], gate=False)
        assert max(made) > 1
        made.clear()
        with decoding(engine.model):
            engine.compile(docs[3:], gate=False)
        assert made == [1, 1, 1]
        assert any(ridden)


def test_nobody_waits_for_streams_that_have_ended() -> None:
    """However patient: the last stream ends while rows wait for its steps."""
    model = tiny()
    ride, cache = riding(model)
    other = model.pool.acquire(8)
    with ThreadPoolExecutor(1) as pool:
        with Steps(model).stream(other):
            step_without(model.rides)
            waits = pool.submit(model.rides.along, ride, 30.0)
            until(lambda: bool(model.rides._waiting))
        waits.result(10)
    assert ride.gone == 0
    for each in (cache, other):
        model.pool.release(each)
