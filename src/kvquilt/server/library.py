"""Uploaded documents and what became of them. A text is on disk before anyone is told that it was taken."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

from kvquilt.prompt import Document
from kvquilt.server.entry import Entry, State
from kvquilt.server.failures import RefusalError
from kvquilt.server.texts import Texts, Uploaded

RETRY = 2  # seconds


Shelf = OrderedDict[str, Entry]


@dataclass(eq=False, slots=True)
class Library:
    """Thread-safe. Reading and writing texts takes a file system's time: not on the event loop.

    Attributes:
        changed: notified of every change; who compiles waits on it. Never held while a file is read or written, but
            for the first look at a tenant's: the event loop takes it, too.
    """

    texts: Texts
    stored: int
    changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _shelves: dict[str | None, Shelf] = field(default_factory=dict, repr=False)
    _waiters: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def shelf(self, tenant: str | None) -> Shelf:
        """The tenant's entries by id, read from disk the first time; hold `changed` while using it."""
        with self.changed:
            if tenant not in self._shelves:
                found = sorted(self.texts.all(tenant), key=lambda each: (each.created, each.id))
                self._shelves[tenant] = OrderedDict((each.id, Entry.of(each)) for each in found)
                self.notify()
            return self._shelves[tenant]

    def put(self, tenant: str | None, several: Sequence[Uploaded]) -> list[Entry]:
        """Take documents; under an id that is there one replaces the text, and the same text changes nothing.

        Raises:
            RefusalError: the tenant would have more than it may; none is taken.
            StoreUnavailableError: a text cannot be kept.
        """
        shelf, entries = self.shelf(tenant), [Entry.of(each) for each in several]
        with self._writing:
            with self.changed:
                known = {each.id: shelf[each.id] for each in entries if each.id in shelf}
            if len(shelf) + len({each.id for each in entries} - known.keys()) > self.stored:
                raise RefusalError(400, "too_many_documents", f"more than {self.stored} documents would be stored")
            new = [not (each.id in known and known[each.id].same(each)) for each in entries]
            for uploaded in compress(several, new):
                self.texts.write(tenant, uploaded)
            with self.changed:
                shelf.update((entry.id, entry) for entry in compress(entries, new))
                for entry in known.values():
                    if entry.state is State.FAILED:  # asked for again
                        entry.state, entry.error = State.QUEUED, None
                self.notify()
                return [shelf[entry.id] for entry in entries]

    def get(self, tenant: str | None, id: str) -> Entry:
        """
        Raises:
            RefusalError: 404, there is none of that id.
        """
        found = self.shelf(tenant).get(id)
        if found is None:
            raise _unknown(id)
        return found

    def document(self, tenant: str | None, id: str) -> Document:
        """The document with its text.

        Raises:
            RefusalError: 404, there is none of that id, or its file is gone or damaged.
        """
        self.get(tenant, id)
        found = self.texts.read(tenant, id)
        if found is None:
            raise _unknown(id)
        return found.document

    def remove(self, tenant: str | None, id: str) -> Uploaded | None:
        """Forget a document; returns it as far as its file could be read.

        Raises:
            RefusalError: 404, there is none of that id.
        """
        with self._writing:
            self.get(tenant, id)
            found = self.texts.read(tenant, id)
            self.texts.remove(tenant, id)
            with self.changed:
                del self.shelf(tenant)[id]
                self.notify()
        return found

    def stands(self, tenant: str | None, digest: str) -> bool:
        """Whether some document of the tenant has the text of this digest."""
        with self.changed:
            return any(each.digest == digest for each in self.shelf(tenant).values())

    async def ready(self, tenant: str | None, ids: Sequence[str], wait: bool) -> None:
        """Return when all are compiled.

        Raises:
            RefusalError: 404 for an unknown one, 409 for one that failed, or is not ready and `wait` is False.
        """
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(self.shelf, tenant)
        while True:
            turn = asyncio.Event()
            with self.changed:
                entries = [self.get(tenant, id) for id in ids]
                for entry in entries:
                    if entry.state is State.FAILED:
                        raise RefusalError(409, "document_failed", f"{entry.id!r} cannot be compiled: {entry.error}")
                pending = [entry for entry in entries if entry.state is not State.READY]
                if not pending:
                    return
                if not wait:
                    rule = f"{pending[0].id!r} is {pending[0].state}; ask again, or wait with kvquilt.wait"
                    raise RefusalError(409, "document_not_ready", rule, retry_after=RETRY)
                for entry in pending:  # somebody waits for these
                    self._shelves[tenant].move_to_end(entry.id, last=False)
                self._waiters.append(partial(loop.call_soon_threadsafe, turn.set))
            await turn.wait()

    def counts(self) -> dict[str, int]:
        """Documents of all tenants by state."""
        with self.changed:
            found = Counter(entry.state for shelf in self._shelves.values() for entry in shelf.values())
        return {state.value: found[state] for state in State}

    def notify(self) -> None:
        """Wake all who wait for a change; with `changed` held."""
        self.changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            with suppress(RuntimeError):  # its loop is closed: the process ends
                wake()


def _unknown(id: str) -> RefusalError:
    return RefusalError(404, "document_not_found", f"there is no document {id!r}; upload it, or send its text", "id")
