"""What a long command says while it goes on: what is left, by what was done, and how often it is said."""

from __future__ import annotations

import pytest

from kvquilt.cli import watching
from kvquilt.cli.watching import Watch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(watching, "perf_counter", lambda: now[0])
    return now


def test_a_line_for_the_first_then_one_a_minute_and_the_last(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch("prompts")
    for done in range(1, 21):
        watch(done, 20, "epic")
        clock[0] += 20
    assert capsys.readouterr().err.splitlines() == [
        "kvquilt: epic, 1 of 20 prompts",
        "kvquilt: epic, 4 of 20 prompts, 5:20 to go",
        "kvquilt: epic, 7 of 20 prompts, 4:20 to go",
        "kvquilt: epic, 10 of 20 prompts, 3:20 to go",
        "kvquilt: epic, 13 of 20 prompts, 2:20 to go",
        "kvquilt: epic, 16 of 20 prompts, 1:20 to go",
        "kvquilt: epic, 19 of 20 prompts, 0:20 to go",
        "kvquilt: epic, 20 of 20 prompts, 0:00 to go",
    ]


def test_what_was_there_is_not_counted_as_done_now(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch("prompts")
    watch.stands(500, 1000, "1 of 2 settings")
    assert watch.remaining(500, 1000) is None
    clock[0] += 60
    watch(510, 1000)
    assert watch.remaining(510, 1000) == pytest.approx(60 * 490 / 10)
    watch.stands(900, 1000, "2 of 2 settings")
    assert watch.remaining(900, 1000) == pytest.approx(60 * 100 / 10)
    assert capsys.readouterr().err.splitlines() == [
        "kvquilt: 1 of 2 settings, 500 of 1,000 prompts",
        "kvquilt: 510 of 1,000 prompts, 49:00 to go",
        "kvquilt: 2 of 2 settings, 900 of 1,000 prompts, 10:00 to go",
    ]
