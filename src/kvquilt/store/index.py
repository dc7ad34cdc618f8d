"""The disk tier's accounting in SQLite: what is there, how large it is and how often it is used.

A hit writes nothing: uses are gathered in memory and applied with the next write, or by a background thread
once there are many. A row without its file, or a file without its row, is put right when it is next used.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvquilt.errors import StoreUnavailableError
from kvquilt.identity import SegmentKey
from kvquilt.store.base import Row

_VERSION = 1
_BUSY_SECONDS = 20.0
_FLUSH_AFTER = 4096  # seldom: the writing thread competes with look-ups for the interpreter
_SCHEMA = """
CREATE TABLE IF NOT EXISTS segments (
    namespace TEXT NOT NULL, digest TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL,
    frequency INTEGER NOT NULL, last_use REAL NOT NULL, created REAL NOT NULL, priority REAL NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_priority ON segments (priority, last_use);
CREATE INDEX IF NOT EXISTS by_namespace ON segments (namespace, priority, last_use, bytes);
CREATE TABLE IF NOT EXISTS clock (only INTEGER PRIMARY KEY CHECK (only = 1), value REAL NOT NULL);
CREATE TABLE IF NOT EXISTS clocks (namespace TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO clock VALUES (1, 0.0);
"""
# GDSF, as in the memory tier: the clock rises to the priority of the last victim, so that old fame fades; where room
# is made within a namespace, only that one's rises
_CLOCK = "max((SELECT value FROM clock), coalesce((SELECT value FROM clocks WHERE namespace = :ns), 0.0))"
_VALUE = _CLOCK + " + CAST({tokens} AS REAL) * {frequency} / max({bytes}, 1)"
_PUT = f"""
INSERT INTO segments VALUES (:ns, :digest, :tokens, :bytes, :uses, :now, :now,
    {_VALUE.format(tokens=":tokens", frequency=":uses", bytes=":bytes")})
ON CONFLICT DO UPDATE SET tokens = :tokens, bytes = :bytes, frequency = frequency + :uses - :created,
    last_use = max(last_use, :now),
    priority = {_VALUE.format(tokens=":tokens", frequency="(frequency + :uses - :created)", bytes=":bytes")}
"""
_USE = f"""
UPDATE segments SET frequency = frequency + :uses, last_use = max(last_use, :now),
    priority = {_VALUE.format(tokens="tokens", frequency="(frequency + :uses)", bytes="bytes")}
WHERE namespace = :ns AND digest = :digest
"""


@dataclass(slots=True)
class _Use:
    """Uses not yet written; sizes are known where the file itself was read."""

    uses: int = 0
    last: float = 0.0
    tokens: int | None = None
    bytes: int = 0


class Index:
    """One connection, shared by all threads of this process.

    `listing` yields what is on disk (key, tokens, bytes) when the index has to be built anew; `on_error` counts
    what goes wrong in the background.

    Raises:
        sqlite3.OperationalError, OSError: the index can be neither opened nor created here.
        StoreUnavailableError: it has another version, or another process keeps it locked.
    """

    def __init__(
        self,
        path: Path,
        listing: Callable[[], Iterable[tuple[SegmentKey, int, int]]],
        exists: Callable[[SegmentKey], bool],
        on_error: Callable[[], object],
    ) -> None:
        self._exists, self._on_error = exists, on_error
        self._lock = threading.RLock()
        self._pending: dict[SegmentKey, _Use] = {}
        self._missing: set[SegmentKey] = set()
        self._pending_lock = threading.Lock()
        self._flusher: threading.Thread | None = None
        try:
            self._db = _open(path, listing)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:  # damaged: it is rebuilt from the files, which loses only how often each was used
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            on_error()
            self._db = _open(path, listing)
        self._finalizer = weakref.finalize(self, self._db.close)

    def used(self, key: SegmentKey, tokens: int | None = None, size: int = 0) -> None:
        """Remember one use; with `tokens` and `size` the row is created if it is missing."""
        with self._pending_lock:
            use = self._pending.setdefault(key, _Use())
            use.uses += 1
            use.last = time.time()
            if tokens is not None:
                use.tokens, use.bytes = tokens, size
            many = len(self._pending) >= _FLUSH_AFTER
        if many:
            self._flush_in_background()

    def missed(self, key: SegmentKey) -> None:
        """Remember that `key` may have no file; its row, if any, is then dropped."""
        with self._pending_lock:
            if len(self._missing) < _FLUSH_AFTER:  # most have no row; one that is left behind is dropped by gc
                self._missing.add(key)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Cursor]:
        """The only writer, among all processes, until the body ends; pending uses are applied before it.

        A body changes a file first and its row next, so whatever was done when an error strikes is consistent
        and is committed, unless the error is the index's own.
        """
        with self._lock:
            self.flush()
            with self._begun() as cursor:
                yield cursor

    @contextmanager
    def exclusive(self) -> Iterator[sqlite3.Cursor]:
        """`transaction` for verbs whose user must hear of it: a failing index is a `StoreUnavailableError`."""
        try:
            with self.transaction() as cursor:
                yield cursor
        except sqlite3.Error as error:
            raise StoreUnavailableError(f"store index: {error}") from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Cursor]:
        """A cursor for queries that wait for no other process: pending uses are applied only if nobody is writing.

        Raises:
            StoreUnavailableError: the index fails.
        """
        try:
            with self._lock:
                self.flush(wait=False)
                yield self._db.cursor()
        except sqlite3.Error as error:
            raise StoreUnavailableError(f"store index: {error}") from error

    def flush(self, wait: bool = True) -> None:
        """Apply pending uses; if the index cannot take them now (a full disk), they stay pending.

        Args:
            wait: for another process that is writing; without it they stay pending, which is no error.
        """
        with self._pending_lock:
            pending, self._pending = self._pending, {}
            missing, self._missing = self._missing, set()
        if not pending and not missing:
            return
        try:
            with self._lock, self._patience(_BUSY_SECONDS if wait else 0), self._begun() as cursor:
                self._apply(cursor, pending, missing)
        except sqlite3.Error as error:
            busy = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_BUSY
            if wait or not busy:
                self._on_error()
            with self._pending_lock:
                self._pending = pending | self._pending
                self._missing |= missing

    def rows(self, namespace: str | None = None) -> list[Row]:
        where = "" if namespace is None else "WHERE namespace = ?"
        query = f"SELECT namespace, digest, tokens, bytes, frequency, last_use FROM segments {where}"
        with self.reading() as cursor:
            found = cursor.execute(query, () if namespace is None else (namespace,)).fetchall()
        return [Row(SegmentKey(row[0], row[1]), *row[2:]) for row in found]

    def totals(self) -> tuple[int, int]:
        """Segments and bytes."""
        with self.reading() as cursor:
            return total(cursor)

    def close(self) -> None:
        flusher = self._flusher
        if flusher is not None:
            flusher.join()
        with self._lock:
            if self._finalizer.alive:
                self.flush()
                self._finalizer()

    @contextmanager
    def _patience(self, seconds: float) -> Iterator[None]:
        """How long the connection waits for another process inside the block."""
        self._db.execute(f"PRAGMA busy_timeout = {seconds * 1000:.0f}")
        try:
            yield
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000:.0f}")

    @contextmanager
    def _begun(self) -> Iterator[sqlite3.Cursor]:
        cursor = self._db.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        try:
            try:
                yield cursor
            except sqlite3.Error:
                raise
            except BaseException:
                cursor.execute("COMMIT")
                raise
            cursor.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                cursor.execute("ROLLBACK")

    def _apply(self, cursor: sqlite3.Cursor, pending: dict[SegmentKey, _Use], missing: set[SegmentKey]) -> None:
        for key, use in pending.items():
            names = {"ns": key.namespace, "digest": key.digest, "uses": use.uses, "now": use.last}
            known = cursor.execute(_USE, names).rowcount
            if not known and use.tokens is not None and self._exists(key):  # a file without a row is adopted
                cursor.execute(_PUT, names | {"tokens": use.tokens, "bytes": use.bytes, "created": 0})
        for key in missing:
            if not self._exists(key):
                delete(cursor, key)

    def _flush_in_background(self) -> None:
        with self._pending_lock:
            if self._flusher is not None and self._flusher.is_alive():
                return
            self._flusher = threading.Thread(target=self.flush, name="kvquilt-index", daemon=True)
            self._flusher.start()


def put(cursor: sqlite3.Cursor, key: SegmentKey, tokens: int, size: int) -> None:
    """Record a file just written; a row already there keeps its frequency."""
    names = {"ns": key.namespace, "digest": key.digest, "tokens": tokens, "bytes": size, "now": time.time()}
    cursor.execute(_PUT, names | {"uses": 1, "created": 1})


def delete(cursor: sqlite3.Cursor, key: SegmentKey) -> None:
    cursor.execute("DELETE FROM segments WHERE namespace = ? AND digest = ?", (key.namespace, key.digest))


def size_of(cursor: sqlite3.Cursor, key: SegmentKey) -> int:
    """Bytes recorded for `key`, 0 if there is no row."""
    query = "SELECT bytes FROM segments WHERE namespace = ? AND digest = ?"
    row = cursor.execute(query, (key.namespace, key.digest)).fetchone()
    return int(row[0]) if row else 0


def total(cursor: sqlite3.Cursor) -> tuple[int, int]:
    count, size = cursor.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM segments").fetchone()
    return int(count), int(size)


def sizes(cursor: sqlite3.Cursor) -> dict[str, int]:
    """Bytes by namespace."""
    query = "SELECT namespace, sum(bytes) FROM segments GROUP BY namespace"
    return {space: int(size) for space, size in cursor.execute(query)}


def victims(cursor: sqlite3.Cursor, limit: int, namespace: str | None = None) -> list[tuple[SegmentKey, int]]:
    """Keys and sizes of the least useful, worst first; of one namespace, or of all."""
    where = "" if namespace is None else "WHERE namespace = :ns"
    query = f"SELECT namespace, digest, bytes FROM segments {where} ORDER BY priority, last_use LIMIT :limit"
    found = cursor.execute(query, {"ns": namespace, "limit": limit})
    return [(SegmentKey(row[0], row[1]), int(row[2])) for row in found]


def retire(cursor: sqlite3.Cursor, key: SegmentKey, apart: bool = False) -> None:
    """Delete an evicted row and let the clock, or with `apart` its namespace's, rise to its priority."""
    names = {"ns": key.namespace, "digest": key.digest}
    priority = "(SELECT priority FROM segments WHERE namespace = :ns AND digest = :digest)"
    if apart:
        known = f"SELECT :ns, {priority} WHERE {priority} IS NOT NULL"
        rise = "ON CONFLICT DO UPDATE SET value = max(value, excluded.value)"
        cursor.execute(f"INSERT INTO clocks {known} {rise}", names)
    else:
        cursor.execute(f"UPDATE clock SET value = max(value, {priority})", names)
    delete(cursor, key)


def _open(path: Path, listing: Callable[[], Iterable[tuple[SegmentKey, int, int]]]) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        _use_wal(db)
        db.execute("PRAGMA synchronous = NORMAL")
        if _version(db) == 0 or (_version(db) == _VERSION and not _complete(db)):
            db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            if _version(db) == 0:  # another process may have been faster
                cursor = db.cursor()
                for key, tokens, size in listing():
                    put(cursor, key, tokens, size)
                db.execute(f"PRAGMA user_version = {_VERSION}")
            db.execute("COMMIT")
        if _version(db) != _VERSION:
            raise StoreUnavailableError(f"store index {path}: version {_version(db)}, this kvquilt reads {_VERSION}")
    except BaseException:
        db.close()
        raise
    return db


def _use_wal(db: sqlite3.Connection) -> None:
    """Switching to WAL does not wait for other processes by itself, whatever the busy timeout."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    f"store index: locked by another process for {_BUSY_SECONDS:.0f} s"
                ) from error
            time.sleep(0.01)


def _complete(db: sqlite3.Connection) -> bool:
    """Whether it knows clocks of namespaces, which it did not at first."""
    found = db.execute("SELECT name FROM sqlite_master WHERE name IN ('clocks', 'by_namespace')").fetchall()
    return len(found) == 2


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])
