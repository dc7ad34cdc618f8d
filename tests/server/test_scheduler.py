"""Turns, bytes and the one prompt that is read, without a model."""

from __future__ import annotations

import asyncio
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
