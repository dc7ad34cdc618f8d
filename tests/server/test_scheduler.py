"""Turns, bytes and the one prompt that is read, without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from kvquilt.server.failures import RefusalError
from kvquilt.server.limits import Limits
from kvquilt.server.scheduler import Scheduler, Ticket


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def lined_up(scheduler: Scheduler, order: list[str], tenant: str, size: int = 1) -> tuple[Ticket, asyncio.Task[None]]:
    ticket = scheduler.enter(tenant)

    async def wait() -> None:
        await ticket.admitted(size)
        order.append(tenant)

    return ticket, asyncio.ensure_future(wait())


def test_tenants_take_turns_and_one_prompt_is_read_at_a_time() -> None:
    async def work() -> None:
        scheduler, order = Scheduler(Limits(streams=10)), list[str]()
        waiting = [lined_up(scheduler, order, tenant)[0] for tenant in ("a", "a", "a", "b", "c", "c")]
        seen = []
        for n in range(6):
            await settle()
            assert (len(order), scheduler.streams) == (n + 1, n + 1)
            reading = next(ticket for ticket in waiting if scheduler._reading is ticket)
            seen.append(reading.tenant)
            reading.begun()
        assert seen == ["a", "a", "b", "c", "a", "c"]  # the first was called before anyone else came
        for ticket in waiting:
            ticket.leave()
            ticket.leave()
        assert (scheduler.streams, scheduler.bytes, scheduler.waiting) == (0, 0, 0)
        scheduler.check_integrity()

    run(work())


def test_no_more_streams_than_there_may_be() -> None:
    async def work() -> None:
        scheduler, order = Scheduler(Limits(streams=2)), list[str]()
        tickets = [lined_up(scheduler, order, "a")[0] for _ in range(3)]
        for ticket in tickets[:2]:
            await settle()
            ticket.begun()
        await settle()
        assert (len(order), scheduler.waiting) == (2, 1)
        tickets[0].leave()
        await settle()
        assert len(order) == 3
        for ticket in tickets:
            ticket.leave()

    run(work())


def test_nobody_passes_one_that_waits_for_bytes() -> None:
    async def work() -> None:
        scheduler, order = Scheduler(Limits(cache_bytes=10)), list[str]()
        first, _ = lined_up(scheduler, order, "small", 6)
        await settle()
        first.begun()
        large, _ = lined_up(scheduler, order, "large", 8)
        small, _ = lined_up(scheduler, order, "late", 1)
        await settle()
        assert order == ["small"]
        first.leave()
        await settle()
        assert order == ["small", "large"]
        large.begun()
        await settle()
        assert order == ["small", "large", "late"]
        large.leave()
        small.leave()
        scheduler.check_integrity()

    run(work())


def test_one_that_never_fits_is_refused_at_once() -> None:
    async def work() -> None:
        scheduler = Scheduler(Limits(cache_bytes=10))
        ticket = scheduler.enter(None)
        with pytest.raises(RefusalError, match="need 11 bytes") as caught:
            await ticket.admitted(11)
        assert caught.value.status == 413
        ticket.leave()
        assert scheduler.waiting == 0

    run(work())


def test_a_full_queue_refuses_and_a_tenant_fills_only_its_share() -> None:
    async def work() -> None:
        scheduler = Scheduler(Limits(queue=4))
        mine = [scheduler.enter("a", tenants=2) for _ in range(2)]
        with pytest.raises(RefusalError) as caught:
            scheduler.enter("a", tenants=2)
        assert (caught.value.status, caught.value.headers) == (503, {"retry-after": "2"})
        others = [scheduler.enter("b", tenants=2) for _ in range(2)]
        with pytest.raises(RefusalError):
            scheduler.enter("c", tenants=4)
        for ticket in mine + others:
            ticket.leave()
        assert scheduler.waiting == 0
        assert not scheduler._waiting

    run(work())


def test_who_gives_up_while_waiting_frees_the_line() -> None:
    async def work() -> None:
        scheduler, order = Scheduler(Limits(streams=1)), list[str]()
        first, _ = lined_up(scheduler, order, "a")
        await settle()
        second, task = lined_up(scheduler, order, "b")
        third, _ = lined_up(scheduler, order, "c")
        await settle()
        task.cancel()
        await settle()
        second.leave()
        first.leave()
        await settle()
        assert order == ["a", "c"]
        third.leave()
        scheduler.check_integrity()

    run(work())


def test_one_that_is_called_and_cancelled_in_the_same_moment_gives_back() -> None:
    async def work() -> None:
        scheduler, order = Scheduler(Limits(streams=1)), list[str]()
        first, _ = lined_up(scheduler, order, "a")
        await settle()
        second, task = lined_up(scheduler, order, "b")
        await settle()
        first.leave()  # calls the second, whose task has not run yet
        task.cancel()
        await settle()
        second.leave()
        assert (order, scheduler.streams, scheduler.bytes) == (["a"], 0, 0)
        scheduler.check_integrity()

    run(work())


def test_what_only_reading_takes_is_given_back_when_the_prompt_is_read() -> None:
    async def work() -> None:
        scheduler, order = Scheduler(Limits(cache_bytes=10)), list[str]()
        first = scheduler.enter("a")
        await first.admitted(4, 5)
        second, _ = lined_up(scheduler, order, "b", 5)
        await settle()
        assert (order, scheduler.bytes) == ([], 9)
        first.begun()
        await settle()
        assert (order, scheduler.bytes) == (["b"], 9)
        first.begun()  # once and for all
        assert scheduler.bytes == 9
        first.leave()
        second.leave()
        with pytest.raises(RefusalError, match="need 6 bytes of cache, and 5 while it is read"):
            await scheduler.enter("a").admitted(6, 5)
        assert scheduler.bytes == 0

    run(work())


def test_one_that_fails_while_it_is_read_gives_all_back() -> None:
    async def work() -> None:
        scheduler = Scheduler(Limits(cache_bytes=10))
        ticket = scheduler.enter("a")
        await ticket.admitted(4, 5)
        ticket.leave()
        assert scheduler.bytes == 0
        scheduler.check_integrity()

    run(work())


def test_who_compiles_has_room_before_those_who_come_and_after_those_who_are_there() -> None:
    async def work() -> None:
        scheduler, order = Scheduler(Limits(cache_bytes=10)), list[str]()
        entered, done = threading.Event(), threading.Event()

        def compile() -> None:
            with scheduler.beside(6, lambda: False) as given:
                assert given
                entered.set()
                assert done.wait(10)

        first, _ = lined_up(scheduler, order, "a", 6)
        await settle()
        first.begun()
        thread = threading.Thread(target=compile)
        thread.start()
        async with asyncio.timeout(10):
            while not scheduler._wanted:
                await asyncio.sleep(0.01)
        second, _ = lined_up(scheduler, order, "b", 1)  # would fit beside the first, and pass who waits
        await settle()
        assert (order, entered.is_set()) == (["a"], False)
        first.leave()
        await asyncio.to_thread(entered.wait, 10)
        await settle()
        assert (order, scheduler.bytes) == (["a", "b"], 7)
        second.begun()
        third, _ = lined_up(scheduler, order, "c", 4)
        await settle()
        assert order == ["a", "b"]
        done.set()
        thread.join(10)
        await settle()
        assert (order, scheduler.bytes) == (["a", "b", "c"], 5)
        for ticket in (second, third):
            ticket.leave()
        scheduler.check_integrity()

    run(work())


def test_who_no_longer_wants_to_compile_has_no_room_and_leaves_none_taken() -> None:
    scheduler = Scheduler(Limits(cache_bytes=10))
    with scheduler.beside(10, lambda: False) as given, scheduler.beside(1, lambda: True) as late:
        assert (given, late, scheduler.bytes) == (True, False, 10)
    assert (scheduler.bytes, scheduler._wanted) == (0, 0)
    scheduler.check_integrity()
