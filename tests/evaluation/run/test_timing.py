"""Turns, medians and what may not be inside a time to the first token."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path

import pytest

from kvquilt.engine import Engine
from kvquilt.errors import InputError
from kvquilt.evaluation.run import timing
from kvquilt.evaluation.run.timing import ArmPrompt, Timing, break_even, first_tokens, take_turns
from kvquilt.repair.presets import find_method
from tests.engines import QUESTION, at_rest, documents, make_engine


def test_arms_take_turns_and_warm_ups_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 0.0, "processor": 0.0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(timing.time, "process_time", lambda: clock["processor"])
    order: list[str] = []

    def arm(name: str, seconds: float) -> None:
        order.append(name)
        clock["wall"] += seconds + (100 if len(order) <= 6 else 0)  # three rounds of two are slow
        clock["processor"] += 2 * seconds

    found = take_turns({"a": lambda: arm("a", 1.0), "b": lambda: arm("b", 3.0)})
    assert "".join(order) == "abba" * 4
    assert found == {"a": Timing((1.0,) * 5, (2.0,) * 5), "b": Timing((3.0,) * 5, (6.0,) * 5)}


@pytest.mark.parametrize("wrong", [{"warmups": 2}, {"repeats": 4}, {"arms": {}}])
def test_too_few_rounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        take_turns(**{"arms": {"a": lambda: None}, **wrong})  # type: ignore[arg-type]


def prompts(engine: Engine, methods: list[str], ranking: list[int]) -> dict[str, ArmPrompt]:
    runs = engine.prompt(QUESTION, documents(len(ranking))).runs(engine.model.tokenizer)
    found = {name: find_method(name) for name in methods}
    return {name: ArmPrompt(m, runs, ranking if m.needs_ranking else ()) for name, m in found.items()}


def test_first_tokens_of_one_prompt() -> None:
    with make_engine() as engine:
        engine.compile(documents(3), gate=False)
        lent = engine.model.pool.lent
        asked = prompts(engine, ["full", "none", "retrieved-document"], [1, 0, 2])
        asked["again"] = dataclasses.replace(asked["full"], in_parts=True)
        found = first_tokens(engine, asked)
        assert list(found) == ["full", "none", "retrieved-document", "again", "prefix-hit"]
        assert all(len(each.wall) == 5 and min(each.wall) > 0 for each in found.values())
        at_rest(engine, lent=lent)


def test_what_is_read_from_a_disk_is_not_timed_as_memory(tmp_path: Path) -> None:
    with make_engine(directory=tmp_path, memory=0) as engine:
        engine.compile(documents(2), gate=False)
        lent = engine.model.pool.lent
        with pytest.raises(InputError, match="none read from disk"):
            first_tokens(engine, prompts(engine, ["full", "none"], [0, 1]))
        with pytest.raises(InputError, match="must have full"):
            first_tokens(engine, prompts(engine, ["none"], [0, 1]))
        at_rest(engine, lent=lent)


def test_requests_until_compiling_has_paid() -> None:
    assert break_even(12.0, 2.0, 0.5) == 8.0
    assert break_even(12.0, 0.5, 0.5) is None
    assert break_even(12.0, 0.5, 2.0) is None


def test_the_clock_is_real() -> None:
    found = take_turns({"a": lambda: time.sleep(0.01)})["a"]
    assert min(found.wall) >= 0.01
    assert statistics.median(found.processor) < found.median, "sleeping takes no processor"
