"""Compiles uploaded documents in the background: tenants in turns, a portion at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvquilt.compiling import CompileReport
from kvquilt.engine import Engine
from kvquilt.errors import InputError, KvquiltError
from kvquilt.model.turns import UnwantedError
from kvquilt.prompt import Document, segment_ids
from kvquilt.server.entry import Entry, State
from kvquilt.server.footprint import of_compiling, slots
from kvquilt.server.library import Library
from kvquilt.server.scheduler import Scheduler

log = logging.getLogger(__name__)
PORTION = 8  # documents at once: short ones share a batch, and who waits for one waits for no more
_ID_BYTES, _HEADER_BYTES = 4, 2048  # of a stored segment beside its keys and values: a token's, and all others
_SAMPLE = 4 * 1024 + 512  # tokens of a sample prompt, at most
SAMPLES = 32  # documents that the gate may draw from


class _StoppedError(Exception):
    """The server ends; what is finished is stored."""


@dataclass(eq=False, slots=True)
class Compiler:
    """One thread; `start` and `stop` it once.

    Attributes:
        gate: where a tenant has no verdict and nothing more to compile, measure whether reuse is safe.
        idle: nothing is queued, nor measured.
        reported: told of every portion that was compiled.
        scheduler: who gives room for its caches among the answers'.
    """

    engine: Engine
    library: Library
    gate: bool
    reported: Callable[[CompileReport], object]
    scheduler: Scheduler
    idle: bool = False
    _stopping: bool = False
    _measured: set[str | None] = field(default_factory=set)
    _thread: threading.Thread = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvquilt-compile", daemon=True)

    def start(self, tenants: Sequence[str | None]) -> None:
        """Begin; documents that these tenants uploaded earlier are looked through first."""
        for tenant in tenants:
            self.library.shelf(tenant)
        self._thread.start()

    def tell(self) -> None:
        """End behind the segment that is being compiled, which is stored."""
        with self.library.changed:
            self._stopping = self.library.closed = True
            self.library.notify()

    def stop(self, seconds: float) -> None:
        """`tell`, and wait until it has ended, for so long at most."""
        self.tell()
        self._thread.join(seconds)

    def size(self, document: Document) -> int:
        """Bytes that the engine's own writer makes of it, as its file has them or a little more."""
        tokens = len(segment_ids(document, self.engine.model.tokenizer))
        return tokens * (self.engine.reader.layout().bytes_per_token + _ID_BYTES) + _HEADER_BYTES

    def discard(self, document: Document, tenant: str | None) -> None:
        """Remove the segments of a document, as the engine's own and trained writers compile it."""
        reader, ids = self.engine.reader, segment_ids(document, self.engine.model.tokenizer)
        for name in ("", *reader.trained):
            for writer in reader.recipe(name).prepare(reader.notes(tenant), [ids]):
                self.engine.store.rm(key=reader.key(ids, tenant, writer))

    def _run(self) -> None:
        turn = 0
        while True:
            with self.library.changed:
                while (work := self._next(turn)) is None and not self._stopping:
                    self.idle = True
                    self.library.changed.wait()
                self.idle = False
                if work is None or self._stopping:
                    return
                tenant, entries = work
            turn += 1
            try:
                if entries:
                    self._compile(tenant, entries)
                else:
                    self._measure(tenant)
            except _StoppedError:
                return
            except Exception as error:  # noqa: BLE001  what the gate met must not keep documents from being compiled
                log.error("failed beside requests: %s", type(error).__name__)

    def _next(self, turn: int) -> tuple[str | None, list[Entry]] | None:
        """Whose turn it is and what is queued; nothing queued means: measure."""
        shelves = list(self.library.shelves.items())
        for n in range(len(shelves)):
            tenant, shelf = shelves[(turn + n) % len(shelves)]
            queued = (entry for entry in shelf.values() if entry.state is State.QUEUED)
            if portion := list(islice(queued, PORTION)):
                return tenant, portion
        for tenant, shelf in shelves:
            ready = any(entry.state is State.READY for entry in shelf.values())
            if self.gate and ready and tenant not in self._measured:
                return tenant, []
        return None

    def _compile(self, tenant: str | None, entries: Sequence[Entry]) -> None:
        held = []
        for entry in entries:
            found = self.library.kept(tenant, entry.id)
            if found is None or found.digest != entry.digest:
                self._say([entry], State.FAILED, "its text is gone")  # or replaced, and then queued anew
            else:
                held.append((entry, found.of(tenant)))
        if not held:
            return
        self._say([entry for entry, _ in held], State.COMPILING)
        try:
            self._pass(tenant, held)
        except _StoppedError:
            raise
        except InputError as error:
            if len(held) > 1:  # one of them is at fault, and the others shall not pay for it
                for each in held:
                    self._compile(tenant, [each[0]])
                return
            self._say([held[0][0]], State.FAILED, str(error))
        except Exception as error:  # noqa: BLE001  the thread outlives whatever one portion meets
            log.error("compiling failed: %s", type(error).__name__)
            reason = str(error) if isinstance(error, KvquiltError) else type(error).__name__
            self._say([entry for entry, _ in held], State.FAILED, reason)
        else:
            self._say([entry for entry, _ in held], State.READY)
            for entry, document in held:
                if not self.library.stands(tenant, entry.digest):  # deleted meanwhile
                    self.discard(document, tenant)

    def _pass(self, tenant: str | None, held: Sequence[tuple[Entry, Document]]) -> None:
        def progress(done: int, total: int) -> None:
            with self.library.changed:
                for entry, _ in held:
                    entry.progress = done, total
            self._check()

        documents, reader = [document for _, document in held], self.engine.reader
        lengths = [len(segment_ids(each, self.engine.model.tokenizer)) for each in documents]
        recipe = self.engine.compiled_by(tenant)
        size, most = of_compiling(reader, lengths, recipe), self.scheduler.limits.cache_bytes
        if size > most:
            raise InputError("cache-mib", f"compiling it takes {size} bytes of cache and this server gives {most}")
        with self.scheduler.beside(size, lambda: self._stopping):
            self._check()
            self.reported(self.engine.compile(documents, tenant, gate=False, progress=progress))
        for entry, document in held:
            entry.segment_bytes = self.size(document)

    def _measure(self, tenant: str | None) -> None:
        self._measured.add(tenant)
        verdict, order = self.engine.verdict(tenant), self.engine.reader.auto_order
        if verdict is not None and all(verdict.verdict(name) is not None for name in order):
            return
        with self.library.changed:
            ids = [entry.id for entry in self.library.shelf(tenant).values() if entry.state is State.READY]
        found = [self.library.texts.read(tenant, id) for id in ids[-SAMPLES:]]
        documents = [each.of(tenant) for each in found if each is not None]
        seconds = self.engine.settings.gate_seconds
        longest = min(_SAMPLE, self.engine.model.capability.max_length)
        caches = 3  # the truth's, a method's and its probe's
        size = caches * slots(longest) * self.engine.reader.layout().bytes_per_token
        room = self.scheduler.beside(min(size, self.scheduler.limits.cache_bytes), lambda: self._stopping)
        try:
            # nothing of a measurement is worth its end, so it stops between two forwards
            with room, self.engine.model.turns.wanted(lambda: self._stopping):
                self._check()
                self.engine.doctor(documents, tenant, seconds=seconds, progress=lambda done, total: self._check())
        except UnwantedError:
            raise _StoppedError from None
        except KvquiltError as error:
            log.warning("the gate could not measure: %s", error)

    def _check(self) -> None:
        if self._stopping:
            raise _StoppedError

    def _say(self, entries: Sequence[Entry], state: State, error: str | None = None) -> None:
        with self.library.changed:
            for entry in entries:
                entry.state, entry.error = state, error
                entry.progress = entry.progress if state is State.COMPILING else None
            self.library.notify()
