"""Uploaded documents and what became of them. A text is on disk before anyone is told that it was taken."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from math import ceil

from kvquilt.identity import PUBLIC
from kvquilt.prompt import Document
from kvquilt.server.entry import Entry, State
from kvquilt.server.failures import RETRY, RefusalError, stopping
from kvquilt.server.fields import PUBLIC_IDS
from kvquilt.server.limits import Limits
from kvquilt.server.texts import Texts, Uploaded

Shelf = OrderedDict[str, Entry]


def whose(tenant: str | None, id: str) -> tuple[str | None, str]:
    """Whose document this tenant means by an id, and its id there."""
    return (PUBLIC, id.removeprefix(PUBLIC_IDS)) if id.startswith(PUBLIC_IDS) else (tenant, id)


@dataclass(eq=False, slots=True)
class Library:
    """Thread-safe. Reading and writing texts takes a file system's time: not on the event loop.

    A tenant reads its own documents and public ones, whose ids begin with ``public/``, and writes its own.

    Attributes:
        changed: notified of every change; who compiles waits on it. Never held while a file is read or written, but
            for the first look at a tenant's: the event loop takes it, too.
        shelves: what was read of tenants so far; hold `changed` while using it.
        closed: nothing more is compiled, so nobody waits for it; set with `changed` held.
    """

    texts: Texts
    limits: Limits
    changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    shelves: dict[str | None, Shelf] = field(init=False, default_factory=dict, repr=False)
    closed: bool = field(init=False, default=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _waiters: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def shelf(self, tenant: str | None) -> Shelf:
        """The tenant's entries by id, read from disk the first time; hold `changed` while using it."""
        with self.changed:
            if tenant not in self.shelves:
                found = sorted(self.texts.all(tenant), key=lambda each: (each.created, each.id))
                self.shelves[tenant] = OrderedDict((each.id, Entry.of(each)) for each in found)
                self.notify()
            return self.shelves[tenant]

    def put(
        self, tenant: str | None, several: Sequence[Uploaded], sizes: Iterable[int] = (), quota: int | None = None
    ) -> list[Entry]:
        """Take documents; under an id that is there one replaces the text, and the same text changes nothing.

        Args:
            sizes: bytes that each takes compiled; `quota`: how many the tenant's may take together.

        Raises:
            RefusalError: the tenant would have more than it may; none is taken.
            StoreUnavailableError: a text cannot be kept; those before it are taken.
        """
        shelf, sizes = self.shelf(tenant), list(sizes) or [0] * len(several)
        entries = [Entry.of(each, size) for each, size in zip(several, sizes, strict=True)]
        with self._writing:
            lost = [self.texts.read(tenant, each.id) is None for each in entries]  # what is sent again mends it
            with self.changed:
                known = {each.id: shelf[each.id] for each in entries if each.id in shelf}
                new = [
                    gone or not (each.id in known and known[each.id].same(each))
                    for each, gone in zip(entries, lost, strict=True)
                ]
                self._check_room(shelf, list(compress(entries, new)), quota)
            written: list[Entry] = []
            try:
                for uploaded, entry in compress(zip(several, entries, strict=True), new):
                    self.texts.write(tenant, uploaded)
                    written.append(entry)
            finally:
                with self.changed:
                    shelf.update((entry.id, entry) for entry in written)
                    self.notify()
            with self.changed:
                for entry in known.values():
                    if entry.state is State.FAILED:  # asked for again
                        entry.state, entry.error = State.QUEUED, None
                self.notify()
                return [shelf[entry.id] for entry in entries]

    def kept(self, tenant: str | None, id: str) -> Uploaded | None:
        """What was uploaded, as far as it can be read, at no moment between a text and its entry."""
        with self._writing:
            return self.texts.read(tenant, id)

    def get(self, tenant: str | None, id: str) -> Entry:
        """
        Raises:
            RefusalError: 404, there is none of that id.
        """
        owner, name = whose(tenant, id)
        found = self.shelf(owner).get(name)
        if found is None:
            raise _unknown(id)
        return found

    def document(self, tenant: str | None, id: str) -> Document:
        """The document with its text.

        Raises:
            RefusalError: 404, there is none of that id, or its file is gone or damaged.
        """
        self.get(tenant, id)
        owner, name = whose(tenant, id)
        found = self.texts.read(owner, name)
        if found is None:
            raise _unknown(id)
        return replace(found.of(owner), id=id)

    def remove(self, tenant: str | None, id: str) -> Uploaded | None:
        """Forget a document; returns it as far as its file could be read.

        Raises:
            RefusalError: 404, there is none of that id; 403, it is public, and a publisher's key removes it.
        """
        owner, id = whose(tenant, id)
        if owner != tenant:
            raise RefusalError(403, "public_document", "public documents are changed with a publisher's key", "id")
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
            RefusalError: 404 for an unknown one, 409 for one that failed, or is not ready and `wait` is False, 503 for
                one that is not ready when the server stops.
        """
        loop = asyncio.get_running_loop()
        meant = [whose(tenant, id) for id in ids]
        for owner in {owner for owner, _ in meant}:
            await asyncio.to_thread(self.shelf, owner)
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
                if self.closed:
                    raise stopping()
                for (owner, name), entry in zip(meant, entries, strict=True):
                    if entry.state is not State.READY:  # somebody waits for it
                        self.shelves[owner].move_to_end(name, last=False)
                self._waiters.append(partial(loop.call_soon_threadsafe, turn.set))
            await turn.wait()

    def counts(self) -> dict[str, int]:
        """Documents of all tenants by state."""
        with self.changed:
            found = Counter(entry.state for shelf in self.shelves.values() for entry in shelf.values())
        return {state.value: found[state] for state in State}

    def _check_room(self, shelf: Shelf, new: Sequence[Entry], quota: int | None) -> None:
        """Raise `RefusalError` where with these the tenant would have more than it may, unless they are less."""
        old = [shelf[each.id] for each in new if each.id in shelf]
        for what, have, more, most in (
            ("documents", len(shelf), len(new) - len(old), self.limits.stored),
            ("MiB of texts", *_summed("text_bytes", shelf, new, old), self.limits.text_bytes),
            ("MiB of compiled segments", *_summed("segment_bytes", shelf, new, old), quota),
        ):
            if most is not None and more > 0 and have + more > most:
                told = _mib if what.startswith("MiB") else str
                rule = (
                    f"these would make {told(have + more)} {what} of yours, and you may keep {told(most)}; delete some"
                )
                raise RefusalError(413, "quota_exceeded", rule)

    def notify(self) -> None:
        """Wake all who wait for a change; with `changed` held."""
        self.changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            with suppress(RuntimeError):  # its loop is closed: the process ends
                wake()


def _summed(name: str, shelf: Shelf, new: Sequence[Entry], old: Sequence[Entry]) -> tuple[int, int]:
    """A number of all entries on the shelf, and how much it grows with `new` in place of `old`."""
    have, more, less = (sum(getattr(each, name) for each in some) for some in (shelf.values(), new, old))
    return have, more - less


def _mib(size: int) -> str:
    """As flags have it, rounded up: what is a little too much must not look as if it fitted."""
    return f"{ceil(size / (1 << 20) * 100) / 100:.2f}"


def _unknown(id: str) -> RefusalError:
    rule = f"there is no document {id!r}; upload it, or send its text; GET /v1/documents lists what there is"
    return RefusalError(404, "document_not_found", rule, "id")
