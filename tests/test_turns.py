"""Who runs the model next, and that nobody who streams waits for the whole of somebody's long prompt."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch

from kvquilt.model import turns as turning
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.pace import FIRST, LEAST, MOST, Pace
from kvquilt.model.rows import RowPlan
from kvquilt.model.turns import Turns
from tests.engines import QUESTION, at_rest, documents, make_engine


def test_those_in_a_hurry_go_first() -> None:
    turns, order = Turns(), []
    waiting = threading.Semaphore(0)

    def plain() -> None:
        waiting.release()
        with turns.taken():
            order.append("plain")

    def urgent() -> None:
        waiting.release()
        with turns.urgent():
            order.append("urgent")

    with ThreadPoolExecutor(4) as pool:
        with turns.taken():
            late = pool.submit(urgent)
            waiting.acquire()
            while not turns._urgent:
                pass
            slow = [pool.submit(plain) for _ in range(3)]
            for _ in slow:
                waiting.acquire()
        for each in (late, *slow):
            each.result(30)
    assert order == ["urgent", "plain", "plain", "plain"]


def test_within_its_own_turn_nobody_waits_for_those_in_a_hurry() -> None:
    turns, entered = Turns(), []
    with ThreadPoolExecutor(1) as pool:
        with turns.taken():

            def urgent() -> None:
                with turns.urgent():
                    entered.append(1)

            waits = pool.submit(urgent)
            while not turns._urgent:
                pass
            with turns.taken(), turns.urgent():
                assert entered == []
        waits.result(30)
    assert entered == [1]
    assert not turns._urgent


def test_a_turn_ends_with_its_block_whatever_ended_it() -> None:
    turns = Turns()
    for block in (turns.taken, turns.urgent):
        with pytest.raises(RuntimeError), block():
            raise RuntimeError
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: turns.taken().__enter__() is None).result(30)


def test_streams_that_pause_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(turning.time, "monotonic", lambda: now[0])
    turns = Turns()
    with turns.streaming(1), turns.streaming(2):
        assert turns.streams == 2
        now[0] = 0.4
        turns.asked(1)
        now[0] = 0.8
        assert turns.streams == 1
        turns.asked(2)
        assert turns.streams == 2
        turns.asked(3)  # none of them
        assert turns.streams == 2
    assert turns.streams == 0


@pytest.mark.parametrize("method", ["full", "none", "epic:k=16", "sempic"])
def test_a_long_prompt_goes_in_short_portions_while_others_stream(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    rows: list[int] = []
    forward = LanguageModel.forward

    def counted(self: LanguageModel, ids: torch.Tensor, plan: RowPlan, *rest: Any, **options: Any) -> torch.Tensor:
        rows.append(ids.numel())
        return forward(self, ids, plan, *rest, **options)

    docs = documents(3, 250)
    with make_engine(trained=True) as other:
        truth = other.ask(QUESTION, docs, method=method).token_ids
    with make_engine(trained=True) as engine:
        monkeypatch.setattr(LanguageModel, "forward", counted)
        monkeypatch.setattr(turning, "_LIVELY", 1e9)
        monkeypatch.setattr(Pace, "step_took", lambda *_: None)  # what a step takes is this machine's
        monkeypatch.setattr(engine.model.turns, "pace", Pace())
        with engine.model.turns.streaming(0):
            assert engine.ask(QUESTION, docs, method=method).token_ids == truth
        shared, rows[:] = list(rows), []
        engine.store.clear_memory()
        assert engine.ask(QUESTION, docs, method=method).token_ids == truth
        at_rest(engine, conversations=1)
    assert max(shared) <= FIRST
    assert max(rows) > FIRST, "nothing is long enough to be cut"


@pytest.mark.parametrize(("step", "fixed", "each", "rows"), [
    (0.010, 0.005, 0.0002, 20), (0.010, 0.011, 0.001, LEAST), (0.010, 0.0, 0.0, MOST), (0.050, 0.010, 0.001, 35),
])  # fmt: skip
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("riding", [False, True])
def test_a_prompt_s_rows_grow_or_shrink_until_they_cost_a_step_s_time(
    step: float, fixed: float, each: float, rows: int, noise: float, riding: bool
) -> None:
    pace, random = Pace(), Random(0)
    pace.portion_took(512, 100.0)
    assert (pace.portion, pace.riding(3)) == (FIRST, 0), "rows are few or many beside a step alone"
    taken = []

    def timed(seconds: float) -> float:
        return seconds * random.uniform(1 - noise, 1 + noise)

    for _ in range(400):
        if riding and (now := pace.riding(3)):
            pace.step_took(3, now, timed(step + fixed + each * now))
            pace.step_took(3, now // 2 - 1, 100.0)  # the rest of a prompt
            taken.append(now)
        else:
            pace.step_took(3, 0, timed(step))
        if not riding:
            taken.append(pace.portion)
            pace.portion_took(pace.portion, timed(fixed + each * pace.portion))
            pace.portion_took(pace.portion // 2 - 1, 100.0)
    late = sorted(taken[200:])[len(taken[200:]) // 2]
    assert rows * 0.7 - 1 <= late <= rows * 1.15 + 1
    assert LEAST <= min(taken) <= max(taken) <= MOST


def test_rows_ride_where_a_step_alone_is_known_and_it_is_measured_again_and_again() -> None:
    pace = Pace()
    for streams in (1, 4):
        assert not pace.riding(streams)
        pace.step_took(streams, 0, 0.1)
        assert pace.riding(streams)
    assert any(not pace.riding(1) for _ in range(100))
    pace.step_took(1, 0, 0.1)
    assert pace.riding(1)


@pytest.mark.parametrize("odd", [0.0, 60.0, float("inf"), float("nan")])
def test_one_odd_time_moves_nothing_far(odd: float) -> None:
    """A machine that slept, a clock that stands."""
    pace = Pace()
    for streams in (1, 2):
        for _ in range(20):
            pace.step_took(streams, 0, 0.01)
    for streams in (1, 2, 7):
        pace.step_took(streams, 0, odd)
        assert 0.0 < pace.step < 0.05
        pace.step_took(streams, pace.riding(streams) or FIRST, odd)
        pace.portion_took(pace.portion, odd)
    for _ in range(400):
        pace.step_took(1, 0, 0.01)
        pace.step_took(1, pace.riding(1), 0.012)
        pace.portion_took(pace.portion, 0.001)
    assert pace.step < 0.05
    assert pace.riding(1) > FIRST
    assert LEAST <= pace.portion <= MOST


def test_what_is_read_beside_nobody_says_nothing_of_portions_beside_streams() -> None:
    with make_engine() as engine:
        pace = engine.model.turns.pace = Pace()
        pace.step_took(1, 0, 0.001)
        engine.ask(QUESTION, documents(3, 250), method="epic:k=1000", max_new_tokens=1)
        assert pace.portion == FIRST
        engine.model.turns.pace = Pace()


def test_the_step_is_that_of_as_many_as_stream_now() -> None:
    pace = Pace()
    for streams, seconds in ((1, 0.05), (16, 0.4), (1, 0.05)):
        for _ in range(50):
            pace.step_took(streams, 0, seconds)
        assert pace.step == pytest.approx(seconds, rel=0.01)


def test_a_turn_s_time_is_that_of_the_turn_without_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(turning.time, "perf_counter", lambda: now[0])
    turns = Turns()
    assert turns.held == 0.0
    for block in (turns.taken, turns.urgent):
        now[0] += 100.0
        with block():
            now[0] += 2.0
            with turns.taken():
                now[0] += 1.0
            assert turns.held == 1.0
        assert turns.held == 3.0


@pytest.mark.parametrize("method", ["none", "cacheblend:1000000"])
def test_a_prompt_that_is_no_longer_wanted_ends_between_two_forwards(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine() as engine:
        stream = engine.stream(QUESTION, documents(6), method=method)
        ran, forward = [], LanguageModel.forward

        def counted(self: LanguageModel, *args: Any, **options: Any) -> torch.Tensor:
            ran.append(1)
            if len(ran) == 2:
                threading.Thread(target=stream.cancel).start()
                while not stream._cancelled.is_set():
                    pass
            return forward(self, *args, **options)

        monkeypatch.setattr(LanguageModel, "forward", counted)
        assert list(stream) == []
        assert (stream.answer.stop_reason, stream.answer.text) == ("cancelled", "")
        assert len(ran) == 2  # the one that it was said in was not begun
        monkeypatch.undo()
        at_rest(engine)
        assert engine.ask(QUESTION, documents(6), method=method, max_new_tokens=2).text
