"""Asking a remote server: calls end with their deadline, and nothing of them goes on afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvquilt.store.line import Loop
from kvquilt.store.medium import UnreachableError


class Call:
    """A call that ends when it is told to, and says how it ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.how = ""

    async def work(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
            self.how = "done"
        except asyncio.CancelledError:
            self.how = "given up"
            raise
        finally:
            self.ended.set()
        return self.how


async def nothing() -> None:
    return


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close(nothing())


def test_a_call_that_is_late_is_given_up_over_there_too(loop: Loop) -> None:
    late, quick = Call(), Call()
    with pytest.raises(TimeoutError):
        loop.run(late.work(600), 0.02)
    assert late.ended.wait(60)
    assert late.how == "given up"
    assert loop.run(quick.work(0), 60) == "done"


def test_what_a_call_raises_is_raised(loop: Loop) -> None:
    async def fail() -> None:
        raise UnreachableError("no connection")

    with pytest.raises(UnreachableError, match="no connection"):
        loop.run(fail(), 60)


def test_closing_ends_what_goes_on_and_says_farewell_in_the_loop(loop: Loop) -> None:
    going, said = Call(), threading.Event()

    async def farewell() -> None:
        assert asyncio.get_running_loop()
        assert going.how == "given up"
        said.set()

    waiting = loop.start(going.work(600))
    assert loop.run(Call().work(0), 60) == "done"
    loop.close(farewell())
    assert said.is_set()
    assert waiting.cancelled()
    with pytest.raises(UnreachableError, match="closed"):
        loop.run(Call().work(0), 60)
    loop.close(farewell())


def test_a_loop_that_nobody_used_has_no_thread() -> None:
    before = threading.active_count()
    loop = Loop()
    loop.close(nothing())
    assert threading.active_count() == before
