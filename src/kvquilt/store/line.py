"""Asking a remote server: one event loop in a thread, a deadline for every call, a circuit breaker before them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from kvquilt.errors import StoreUnavailableError
from kvquilt.store.base import FailureReason, MissReason
from kvquilt.store.breaker import Breaker
from kvquilt.store.medium import RefusedError, UnreachableError

if TYPE_CHECKING:
    from kvquilt.remote import Limits
    from kvquilt.store.medium import Medium

T = TypeVar("T")
log = logging.getLogger(__name__)
_LEAVING_SECONDS = 1.0


class NoAnswerError(Exception):
    """Nothing came back: why, as a read and as a write see it. Never leaves `kvquilt.store`."""

    def __init__(self, miss: MissReason, failure: FailureReason) -> None:
        self.miss, self.failure = miss, failure
        super().__init__(miss.value)


class Line:
    """The way to `medium`, from any thread."""

    def __init__(self, medium: Medium, limits: Limits) -> None:
        self._medium, self._limits = medium, limits
        self._loop = Loop()
        self.breaker = Breaker(limits.failures, self._left_alone)

    def call(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """The result within the deadline, with the breaker told how it went.

        Raises:
            NoAnswerError: there is none, or the breaker is open and nothing was asked.
        """
        if not self.breaker.closed:
            work.close()
            raise NoAnswerError(MissReason.NOT_ASKED, FailureReason.NOT_ASKED)
        before = time.monotonic()
        try:
            result = self._loop.run(work, seconds)
        except TimeoutError:
            self.breaker.failed(late=True)
            raise NoAnswerError(MissReason.TIMEOUT, FailureReason.TIMEOUT) from None
        except UnreachableError:
            self.breaker.failed(late=False)
            raise NoAnswerError(MissReason.UNREACHABLE, FailureReason.UNREACHABLE) from None
        except RefusedError as error:
            if not error.full:
                self.breaker.failed(late=False)
            failure = FailureReason.NO_SPACE if error.full else FailureReason.REFUSED
            raise NoAnswerError(MissReason.UNREADABLE, failure) from None
        self.breaker.succeeded((time.monotonic() - before) / seconds)
        return result

    def insist(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """The result, for whoever asks for the server itself; the breaker has no say.

        Raises:
            StoreUnavailableError: there is none.
        """
        try:
            return self._loop.run(work, seconds)
        except (TimeoutError, UnreachableError, RefusedError) as error:
            what = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise StoreUnavailableError(f"remote tier {self._medium.place}: {what}") from None

    def close(self) -> None:
        self._loop.close(self._medium.close())

    def _left_alone(self) -> None:
        """The breaker opened: say so, the first time, and ask in the background whether the server is back."""
        place, pause = self._medium.place, self._limits.pause
        tell = log.warning if self.breaker.openings == 1 else log.debug
        tell("remote tier %s does not answer; asked again every %g s, meanwhile done without", place, pause)
        with contextlib.suppress(UnreachableError):  # it is being closed
            self._loop.start(self._wait_for_it())

    async def _wait_for_it(self) -> None:
        while True:
            await asyncio.sleep(self._limits.pause)
            self.breaker.try_again()
            answered = False
            try:
                async with asyncio.timeout(self._limits.deadline):
                    await self._medium.ping()
                answered = True
            except (TimeoutError, UnreachableError, RefusedError):
                continue
            finally:
                self.breaker.settle(answered=answered)
            log.info("remote tier %s answers again", self._medium.place)
            return


class Loop:
    """An event loop in a daemon thread that begins with the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """The result of `work`; after `seconds` it is cancelled, whatever it does.

        Raises:
            TimeoutError: it was not done by then.
            UnreachableError: the loop is closed, or was meanwhile.
        """
        future = self.start(work)
        try:
            return future.result(seconds)
        except concurrent.futures.CancelledError:
            raise UnreachableError("closed") from None
        finally:
            future.cancel()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if self._closed:
                work.close()
                raise UnreachableError("closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="kvquilt-remote", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, farewell: Coroutine[Any, Any, None]) -> None:
        """Run `farewell` if anything ever ran, cancel what is left, and end the thread."""
        with self._lock:
            loop, thread, self._loop, self._closed = self._loop, self._thread, None, True
        if loop is None or thread is None:
            farewell.close()
            return
        ending = asyncio.run_coroutine_threadsafe(_end(farewell), loop)
        with contextlib.suppress(TimeoutError):
            ending.result(_LEAVING_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_LEAVING_SECONDS)
        if not thread.is_alive():
            loop.close()


async def _end(farewell: Coroutine[Any, Any, None]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await farewell
