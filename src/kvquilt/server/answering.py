"""One answer: a thread that iterates the engine's stream, and pieces as the event loop gets them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvquilt.answer import Answer, Stream
from kvquilt.server.deadline import Deadline
from kvquilt.server.scheduler import Ticket

Open = Callable[[Callable[[], None]], Stream]  # given what to call once the prompt is read


class Answering:
    """Pieces, then the `Answer`. Made on the event loop with a ticket that was admitted, which it gives back itself,
    when its thread no longer holds anything.

    Args:
        among: those whose threads run; it is in there until its own has given everything back.
        paced: told of the seconds between two pieces, from the thread.
    """

    def __init__(
        self,
        open: Open,
        ticket: Ticket,
        deadline: Deadline,
        among: set[Answering],
        paced: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._open, self._ticket, self._deadline, self._paced = open, ticket, deadline, paced
        self._loop = asyncio.get_running_loop()
        self._found: asyncio.Queue[str | Answer | BaseException] = asyncio.Queue()  # at most an answer's tokens
        self._stream: Stream | None = None
        self._stopped, self._among = False, among
        among.add(self)
        self.thread = threading.Thread(target=self._run, name="kvquilt-answer", daemon=True)
        self.thread.start()

    async def next(self) -> str | Answer:
        """The next piece, or the answer, which is the last.

        Raises:
            RefusalError: the deadline is over; the answer stops.
            KvquiltError: reading or decoding failed.
        """
        try:
            async with asyncio.timeout_at(self._deadline.at):
                found = await self._found.get()
        except TimeoutError:
            self.stop()
            raise self._deadline.missed("the answer took longer than its deadline") from None
        if isinstance(found, BaseException):
            raise found
        return found

    def stop(self) -> None:
        """Give everything back within one step; harmless when it has ended."""
        self._stopped = True
        if self._stream is not None:
            self._stream.cancel()

    def _run(self) -> None:
        try:
            with self._open(lambda: self._tell(self._ticket.begun)) as stream:
                self._stream = stream
                if not self._stopped:
                    last = None
                    for piece in stream:
                        now = time.perf_counter()
                        if last is not None:
                            self._paced(now - last)
                        last = now
                        self._tell(self._found.put_nowait, piece)
                    self._tell(self._found.put_nowait, stream.answer)
        except Exception as error:  # noqa: BLE001  raised where the answer is waited for
            self._tell(self._found.put_nowait, error)
        finally:
            self._tell(self._leave)

    def _leave(self) -> None:
        self._among.discard(self)
        self._ticket.leave()

    def _tell(self, call: Callable[..., None], *values: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends, and nobody waits
            self._loop.call_soon_threadsafe(call, *values)
