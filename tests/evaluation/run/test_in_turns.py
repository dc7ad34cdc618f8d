"""First tokens of a run: which prompts, which arms, and nothing timed twice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError, IntegrityError
from kvquilt.evaluation.run import in_turns as run_timing
from kvquilt.evaluation.run.in_turns import of_median_length, time_run
from kvquilt.evaluation.run.run import Finished, Run
from kvquilt.evaluation.run.timed_prompt import TimedPrompt, read_timing
from kvquilt.evaluation.run.timing import Timing
from kvquilt.evaluation.tasks.item import Item
from tests.engines import at_rest, documents, make_engine
from tests.evaluation.run.test_run import CONFIG

METHODS = (
    "none",
    "cacheblend:1",  # its probe costs more: refused everywhere
    "retrieved-document",
    "none:writer=neighbours",
    "fewer-documents:1",
    "full-in-order-of:retrieved-document",
    "oracle:retrieved-document",
    "deranged:none",
    "insert:target",  # its rows are computed beside it
    "full-again",
)
UNTIMED = {"cacheblend:1", "insert:target"}
TIMED = ("full", "no-context", *(name for name in METHODS if name not in UNTIMED), "prefix-hit")


def make_run(folder: Path) -> Run:
    """Three items; the second is the longest, the third of median length."""
    items = []
    for n, length in enumerate((30, 120, 60)):
        held = documents(6, length)[n::3]
        items.append(Item(f"item-{n}", tuple(held), "What does it do?", ("x",), (1,), f"g-{n}", "topics"))
    config = dataclasses.replace(CONFIG, methods=METHODS, new_tokens=2, self_tokens=2)
    return Run(make_engine(), items, config, folder)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Finished, tuple[TimedPrompt, ...]]:
    run = make_run(tmp_path_factory.mktemp("timed"))
    finished = run.go()
    lent = run.engine.model.pool.lent
    found = time_run(run, finished)
    at_rest(run.engine, lent=lent)
    return run, finished, found


def test_every_arm_that_can_run_is_timed_on_a_prompt_of_median_length(
    timed: tuple[Run, Finished, tuple[TimedPrompt, ...]],
) -> None:
    run, finished, (prompt,) = timed
    assert prompt.item == "item-2"
    assert tuple(prompt.arms) == TIMED
    assert all(len(each.wall) == len(each.processor) == 5 and min(each.wall) > 0 for each in prompt.arms.values())
    full = next(line for line in finished.lines if (line["item"], line["method"]) == ("item-2", "full"))
    assert prompt.tokens == full["prompt"]["tokens"]
    assert set(prompt.compile) == {"none", "retrieved-document", "none:writer=neighbours"}
    assert prompt.compile["none"] == prompt.compile["retrieved-document"] > 0
    assert {"command", "machine", "threads", "dtype", "load", "warmups", "repeats"} <= prompt.about.keys()
    assert read_timing(run.folder) == (prompt,)


def test_prompts_of_the_arms_are_those_of_their_lines(
    timed: tuple[Run, Finished, tuple[TimedPrompt, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, finished, _ = timed
    read: dict[str, Any] = {}

    def note(engine: Any, prompts: Any, *rest: Any) -> dict[str, Timing]:
        read.update(prompts)
        return dict.fromkeys(prompts, Timing((1.0,), (1.0,)))

    monkeypatch.setattr(run_timing, "first_tokens", note)
    for name in ("run.json", "items.jsonl", "lines.jsonl"):
        (tmp_path / name).write_bytes((run.folder / name).read_bytes())
    time_run(dataclasses.replace(run, folder=tmp_path), finished)
    lines = {line["method"]: line for line in finished.lines if line["item"] == "item-2"}
    assert lines.keys() - read.keys() == UNTIMED
    for name, prompt in read.items():
        assert sum(len(each.ids) for each in prompt.runs) == lines[name]["prompt"]["tokens"]
    held = {
        name: [each.document.id for each in prompt.runs if each.document is not None] for name, prompt in read.items()
    }
    moved = [use["id"] for use in lines["retrieved-document"]["ledger"]["documents"]]
    assert held["full-in-order-of:retrieved-document"] == moved
    assert set(held["deranged:none"]).isdisjoint(held["none"])
    assert (read["oracle:retrieved-document"].ranking[0], read["none"].ranking) == (1, ())
    assert read["full-again"].in_parts


def test_what_is_there_is_not_timed_again_and_what_is_missing_is(
    timed: tuple[Run, Finished, tuple[TimedPrompt, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, finished, found = timed
    for name in ("run.json", "items.jsonl", "lines.jsonl", "timing.json"):
        (tmp_path / name).write_bytes((run.folder / name).read_bytes())
    again = dataclasses.replace(run, folder=tmp_path)
    done: list[tuple[int, int]] = []

    def once(self: Any, name: str, lines: Any) -> TimedPrompt:
        if len(done) == 2:
            raise KeyboardInterrupt
        return dataclasses.replace(found[0], item=name)

    with monkeypatch.context() as patch:
        patch.setattr(run_timing._Timer, "__init__", lambda *arguments: pytest.fail("timed again"))
        assert time_run(again, finished, 1) == time_run(again, finished, 0) == found
    monkeypatch.setattr(run_timing._Timer, "prompt", once)
    with pytest.raises(KeyboardInterrupt):
        time_run(again, finished, 3, lambda n, of: done.append((n, of)))
    assert done == [(2, 3), (3, 3)]
    assert [each.item for each in read_timing(tmp_path)] == ["item-2", "item-0"], "stopped, it keeps what it has"
    done.clear()
    assert [each.item for each in time_run(again, finished, 3)] == ["item-2", "item-0", "item-1"]


def test_lengths_and_refusals_choose_the_prompts() -> None:
    def lines(tokens: int, refused: str | None = None) -> dict[str, Any]:
        return {"full": {"prompt": {"tokens": tokens}, "refused": None}, "none": {"refused": refused}}

    given = {"a": lines(10), "b": lines(90), "c": lines(52), "d": lines(50, "its probe"), "e": lines(46)}
    assert of_median_length(given) == ["c", "e", "a", "b", "d"]


def test_runs_that_are_not_finished_and_damaged_times_are_refused(
    timed: tuple[Run, Finished, tuple[TimedPrompt, ...]], tmp_path: Path
) -> None:
    run, finished, _ = timed
    with pytest.raises(InputError, match="must be a run that is finished"):
        time_run(run, Finished(finished.lines[:-1], {}))
    with pytest.raises(InputError, match="prompts: must be an integer from 0"):
        time_run(run, finished, -1)
    assert read_timing(tmp_path) == ()
    whole = json.loads((run.folder / "timing.json").read_text())
    for change in ({"item": None, "arms": {}}, {"arms": {"full": {"wall": [], "processor": []}}}, {"compile": 3}):
        wrong = {"prompts": [whole["prompts"][0] | change]}
        (tmp_path / "timing.json").write_text(json.dumps(wrong))
        with pytest.raises(IntegrityError, match="not the times of a run"):
            read_timing(tmp_path)
    (tmp_path / "timing.json").write_text('{"prompts": [')
    with pytest.raises(IntegrityError, match="not the times of a run"):
        read_timing(tmp_path)
