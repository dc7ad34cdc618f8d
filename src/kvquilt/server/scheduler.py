"""Who is answered next: tenants in turns, one prompt being read at a time, within bytes and streams."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvquilt.errors import IntegrityError
from kvquilt.server.failures import RETRY, RefusalError
from kvquilt.server.limits import Limits

_LOOK = 0.1  # seconds after which who waits for room looks whether it still wants it


@dataclass(eq=False, slots=True)
class Ticket:
    """One request's place; `leave` gives back whatever it has, once and for all.

    Attributes:
        bytes: of its caches, known from `admitted` on; `reading` of them only until the prompt is read.
    """

    scheduler: Scheduler = field(repr=False)
    tenant: str | None
    bytes: int = 0
    reading: int = 0
    _called: asyncio.Future[None] | None = None
    _streaming: bool = False
    _left: bool = False

    async def admitted(self, size: int, reading: int = 0) -> None:
        """Wait for this tenant's turn, a stream, room for these bytes, and until no other prompt is being read.

        Args:
            size: until it leaves; `reading`: more, until `begun`.

        Raises:
            RefusalError: it would never fit.
        """
        limit = self.scheduler.limits.cache_bytes
        if size + reading > limit:
            needed = f"{size} bytes of cache" + (f", and {reading} while it is read," if reading else "")
            rule = f"prompt and answer need {needed} and this server gives {limit}; shorten either"
            raise RefusalError(413, "cache_too_small", rule)
        self.bytes, self.reading = size + reading, reading
        self._called = asyncio.get_running_loop().create_future()
        self.scheduler._line(self)
        await self._called

    def begun(self) -> None:
        """The prompt is read: the next one may be."""
        self.scheduler._read(self)

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self.scheduler._leave(self)


class Scheduler:
    """Of one event loop, from which alone it is used but for `beside`, and to be looked at.

    Turns go round over tenants that wait; whoever is next and does not fit holds up all others, so that a long prompt
    is not passed for ever by short ones. A tenant has its share of the queue, whatever others send.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._room = threading.Condition(threading.RLock())
        self._beside = self._wanted = 0
        self._lines: OrderedDict[str | None, deque[Ticket]] = OrderedDict()
        self._waiting: Counter[str | None] = Counter()
        self._reading: Ticket | None = None
        self.streams = self.bytes = 0

    @property
    def waiting(self) -> int:
        """Requests that have entered and are not being answered."""
        with self._room:
            return self._waiting.total()

    def enter(self, tenant: str | None, tenants: int = 1) -> Ticket:
        """A place in the queue.

        Args:
            tenants: how many share it.

        Raises:
            RefusalError: the queue, or this tenant's share of it, is full.
        """
        share = max(1, self.limits.queue // max(1, tenants))
        with self._room:  # a thread that gives room back calls the next one, who then no longer waits
            if self.waiting >= self.limits.queue or self._waiting[tenant] >= share:
                raise RefusalError(503, "queue_full", "too many requests are waiting", retry_after=RETRY)
            self._waiting[tenant] += 1
        return Ticket(self, tenant)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` where something is held and nobody is there."""
        with self._room:
            bytes = self.bytes - self._beside
            if self.waiting == 0 and (self._lines or (self.streams == 0 and (bytes or self._reading))):
                raise IntegrityError(f"scheduler: {bytes} bytes and {len(self._lines)} lines of nobody")

    @contextmanager
    def beside(self, size: int, unwanted: Callable[[], bool]) -> Iterator[bool]:
        """Room for the caches of a thread that answers nobody; it has them as soon as they fit, before who comes.

        At most one thread at a time.

        Args:
            size: at most all that there is.
            unwanted: ends the waiting; the block is then given False, and no room.
        """
        with self._room:
            self._wanted = size
            while (late := self.bytes + size > self.limits.cache_bytes) and not unwanted():
                self._room.wait(_LOOK)
            self._wanted, taken = 0, 0 if late else size
            self._beside += taken
            self.bytes += taken
        try:
            yield not late
        finally:
            with self._room:
                self._beside -= taken
                self.bytes -= taken
                self._call()

    def _line(self, ticket: Ticket) -> None:
        with self._room:
            self._lines.setdefault(ticket.tenant, deque()).append(ticket)
            self._call()

    def _read(self, ticket: Ticket) -> None:
        with self._room:
            if self._reading is ticket:
                self._reading = None
                self.bytes -= ticket.reading
                ticket.bytes -= ticket.reading
                self._call()

    def _leave(self, ticket: Ticket) -> None:
        with self._room:
            if ticket._streaming:
                self.streams, self.bytes = self.streams - 1, self.bytes - ticket.bytes
                if self._reading is ticket:
                    self._reading = None
            else:
                self._waiting[ticket.tenant] -= 1
                with suppress(KeyError, ValueError):  # it had not lined up yet
                    self._lines[ticket.tenant].remove(ticket)
                if not self._lines.get(ticket.tenant, True):
                    del self._lines[ticket.tenant]
            self._waiting += Counter()  # tenants that are gone take no room
            self._call()

    def _call(self) -> None:
        """Begin with the next one if it may; with `_room` held."""
        self._room.notify_all()
        while self._lines and self._reading is None and self.streams < self.limits.streams:
            tenant, line = next(iter(self._lines.items()))
            ticket = line[0]
            if self.bytes + ticket.bytes + self._wanted > self.limits.cache_bytes:
                return
            line.popleft()
            if line:
                self._lines.move_to_end(tenant)
            else:
                del self._lines[tenant]
            self._waiting[tenant] -= 1
            ticket._streaming, self._reading = True, ticket
            self.streams, self.bytes = self.streams + 1, self.bytes + ticket.bytes
            assert ticket._called is not None
            with suppress(RuntimeError):  # its loop is closed: the process ends
                ticket._called.get_loop().call_soon_threadsafe(_set, ticket._called)


def _set(called: asyncio.Future[None]) -> None:
    if not called.done():  # cancelled: it is about to leave
        called.set_result(None)
