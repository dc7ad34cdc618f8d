"""The disk tier: one immutable file per segment, memory-mapped reads, a byte budget."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from kvquilt.store import index
from kvquilt.store.base import (
    Failure,
    FailureReason,
    Hit,
    Layout,
    Miss,
    MissReason,
    Row,
    Stored,
    Tier,
    TierStats,
    failure_reason,
)
from kvquilt.store.counts import Counts, Pins
from kvquilt.store.files import Files, map_file
from kvquilt.store.format import DamageError, decode, encode, pack_ids, parse, stored_tokens, verify_checksum
from kvquilt.store.maintenance import GcReport, VerifyReport, check_agreement, collect, verify
from kvquilt.store.quotas import Quotas, Quoting

if TYPE_CHECKING:
    import torch

    from kvquilt.identity import SegmentKey
    from kvquilt.segment import CompiledSegment

_VERIFIED_FILES = 1 << 16  # some 20 MB of keys; a file beyond is verified again when it is next read


class DiskTier(Tier):
    """Segments below `root`, shared with any number of processes; bytes are file sizes.

    A directory that can only be read, or whose index cannot be used (a full disk, for one), is served without
    the index: hits work, every put is a counted failure.

    Raises:
        StoreUnavailableError: the directory cannot be created or read, has another format, or stays locked.
    """

    name = "disk"

    def __init__(self, root: Path, budget: int | None = None) -> None:
        self.budget = budget
        self.files = Files(root)
        self._counts = Counts()
        self._pins = Pins()
        self._verified: dict[SegmentKey, tuple[int, int, int]] = {}
        self._verified_lock = threading.Lock()
        self._quoting: Quoting | None = None
        self._index: index.Index | None = None
        self._refusal = FailureReason.READ_ONLY
        if self.files.writable:
            try:
                place = self.files.base / "index.sqlite"
                self._index = index.Index(place, self._listing, self.contains, self._index_error)
            except (sqlite3.OperationalError, OSError):
                self._refusal = FailureReason.INDEX
                self._index_error()

    def get(self, key: SegmentKey, ids: tuple[int, ...], layout: Layout | None = None) -> Hit | Miss:
        try:
            content, identity = map_file(self.files.path(key))
            segment = self._open(key, ids, layout, content, identity)
        except DamageError as damage:
            return self._counts.miss(damage.reason)
        except FileNotFoundError:
            self._forget(key)  # another process evicted it
            if self._index is not None:
                self._index.missed(key)
            return self._counts.miss(MissReason.ABSENT)
        except OSError:
            return self._counts.miss(MissReason.UNREADABLE)
        if self._index is not None:
            self._index.used(key, segment.tokens, content.nbytes)
        self._counts.hit()
        return Hit(segment, segment.nbytes)

    def quote(self, quoting: Quoting) -> None:
        """Hold every namespace to its quota from now on, in what this process puts."""
        self._quoting = quoting

    def put(self, key: SegmentKey, segment: CompiledSegment) -> Stored | Failure:
        path, parts = self.files.path(key), encode(key, segment)
        size = sum(part.nbytes for part in parts)
        if self.budget is not None and size > self.budget:
            return self._counts.failure(FailureReason.OVER_BUDGET)
        quotas = None if self._quoting is None else self._quoting().within(self.budget)
        if quotas is not None and size > quotas.bytes.get(key.namespace, 0):
            return self._counts.failure(FailureReason.OVER_QUOTA)
        if self._index is None:
            return self._counts.failure(self._refusal)
        published = replaced = False
        try:
            # the slow part, writing and syncing, happens before the lock that all processes share
            with self.files.staged(path, parts) as staged, self._index.transaction() as cursor:
                excess = self._excess(cursor, key, size, quotas)
                if excess is None:
                    return self._counts.failure(FailureReason.HELD)
                # evict last: a rename that fails must not have cost another segment its place
                replaced = index.size_of(cursor, key) > 0
                staged.publish()
                published = True
                index.put(cursor, key, segment.tokens, size)
                self._evict_for(key, cursor, excess)
        except OSError as error:
            return self._counts.failure(failure_reason(error))
        except sqlite3.Error as error:
            if published and not replaced:  # what is not accounted for would escape the budget
                with contextlib.suppress(OSError):
                    self._unlink(key)
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            return self._counts.failure(FailureReason.NO_SPACE if full else FailureReason.INDEX)
        return Stored(size)

    def touch(self, key: SegmentKey) -> None:
        if self._index is not None:
            self._index.used(key)

    def remove(self, key: SegmentKey) -> bool:
        if self._index is None:
            self._counts.failure(self._refusal)
            return False
        try:
            with self._index.transaction() as cursor:
                found = self._unlink(key)
                index.delete(cursor, key)
                return found
        except OSError as error:
            self._counts.failure(failure_reason(error))
        except sqlite3.Error:
            self._index_error()
        return False

    def contains(self, key: SegmentKey) -> bool:
        return os.path.exists(self.files.path(key))

    def keys(self, namespace: str | None = None) -> Iterator[SegmentKey]:
        """Keys of the files themselves, whatever the index says."""
        return (key for key, _ in self.files.scan(namespace))

    def rows(self, namespace: str | None = None) -> Iterator[Row]:
        if self._index is not None:
            return iter(self._index.rows(namespace))
        return (Row(key, tokens, size, 0, 0.0) for key, tokens, size in self._listing(namespace))

    def sizes(self) -> Mapping[str, int]:
        if self._index is not None:
            with self._index.reading() as cursor:
                return index.sizes(cursor)
        found: Counter[str] = Counter()
        for key, size in self.files.scan():
            found[key.namespace] += size
        return found

    def pin(self, key: SegmentKey) -> AbstractContextManager[None]:
        return self._pins.hold(key)

    def stats(self) -> TierStats:
        if self._index is not None:
            segments, size = self._index.totals()
        else:
            sizes = [size for _, size in self.files.scan()]
            segments, size = len(sizes), sum(sizes)
        return self._counts.stats(segments, size, self.budget, len(self._pins))

    def check_integrity(self) -> None:
        """Index and files agree, and the budget is kept. Contents are the business of `verify`."""
        if self._index is not None:
            with self._index.exclusive() as cursor:
                check_agreement(self.files, cursor, self.budget)

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Read every file and check every bit; with `repair`, damaged files are removed."""
        report = verify(self.files)
        return report.repaired(sum(self.remove(key) for key, _ in report.damaged)) if repair else report

    def gc(self) -> GcReport:
        """Remove abandoned temporary files, bring index and files together, and shrink to the budget."""
        if self._index is None:
            return GcReport()
        with self._index.exclusive() as cursor:
            report = collect(self.files, cursor, self._listing())
            before = self._counts.evictions
            self._evict(cursor, 0 if self.budget is None else index.total(cursor)[1] - self.budget)
            return report.evicting(self._counts.evictions - before)

    def close(self) -> None:
        if self._index is not None:
            self._index.close()

    def _open(
        self,
        key: SegmentKey,
        ids: tuple[int, ...],
        layout: Layout | None,
        content: torch.Tensor,
        identity: tuple[int, int, int],
    ) -> CompiledSegment:
        raw = content.numpy().data
        header = parse(raw, raw.nbytes)
        if header.key != key:
            raise DamageError(MissReason.SWAPPED)
        segment = decode(content, header, ids)
        refusal = layout.refusal(segment) if layout is not None else None
        if refusal is not None:
            raise DamageError(refusal)
        if self._verified.get(key) != identity:
            verify_checksum(raw, header)
            self._remember(key, identity)
        if raw[header.ids_at : header.ids_end] != pack_ids(ids):
            raise DamageError(MissReason.COLLISION)
        return segment

    def _remember(self, key: SegmentKey, identity: tuple[int, int, int]) -> None:
        """Verified once, a file is not verified again while it is the same; the oldest are forgotten."""
        with self._verified_lock:
            self._verified[key] = identity
            while len(self._verified) > _VERIFIED_FILES:
                del self._verified[next(iter(self._verified))]

    def _forget(self, key: SegmentKey) -> None:
        with self._verified_lock:
            self._verified.pop(key, None)

    def _excess(
        self, cursor: sqlite3.Cursor, key: SegmentKey, size: int, quotas: Quotas | None
    ) -> Mapping[str | None, int] | None:
        """Bytes to evict by namespace (of any, under None), so that `key` can take `size`; None if holds forbid it."""
        if self.budget is None and quotas is None:
            return {}
        replaced = index.size_of(cursor, key)
        held: Counter[str] = Counter()
        for name in {key, *self._pins.keys()}:
            held[name.namespace] += index.size_of(cursor, name)
        if quotas is not None:
            taken = index.sizes(cursor)
            free = {space: each - held[space] for space, each in taken.items()}
            plan = quotas.relief(taken, free, key.namespace, size - replaced, self.budget)
            return None if plan is None else dict(plan.items())
        assert self.budget is not None
        occupied = index.total(cursor)[1]
        excess = occupied - replaced + size - self.budget
        return None if excess > occupied - held.total() else {None: excess}

    def _evict_for(self, key: SegmentKey, cursor: sqlite3.Cursor, excess: Mapping[str | None, int]) -> None:
        """Evict for the newcomer `key`, which gives way if that fails."""
        try:
            for space, needed in excess.items():
                self._evict(cursor, needed, key, space)
        except OSError:
            self._unlink(key)
            index.delete(cursor, key)
            raise

    def _evict(
        self, cursor: sqlite3.Cursor, needed: int, keep: SegmentKey | None = None, space: str | None = None
    ) -> None:
        spared = {*self._pins.keys(), keep}
        while needed > 0:
            batch = [each for each in index.victims(cursor, 64 + len(spared), space) if each[0] not in spared]
            if not batch:
                return
            for key, size in batch:
                if needed <= 0:
                    return
                self._unlink(key)
                index.retire(cursor, key, apart=self._quoting is not None)
                self._counts.evicted(1)
                needed -= size

    def _unlink(self, key: SegmentKey) -> bool:
        self._forget(key)
        try:
            os.unlink(self.files.path(key))
        except FileNotFoundError:
            return False
        finally:
            if self._index is not None:  # should the transaction around this fail, the row goes all the same
                self._index.missed(key)
        return True

    def _listing(self, namespace: str | None = None) -> Iterator[tuple[SegmentKey, int, int]]:
        for key, size in self.files.scan(namespace):
            yield key, stored_tokens(self.files.path(key)), size

    def _index_error(self) -> Failure:
        return self._counts.failure(FailureReason.INDEX)
