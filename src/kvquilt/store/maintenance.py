"""Work on a whole store directory: verifying every file, collecting garbage, comparing index and files."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvquilt.errors import IntegrityError
from kvquilt.identity import SegmentKey
from kvquilt.store import index
from kvquilt.store.base import MissReason
from kvquilt.store.format import DamageError, parse, verify_checksum

if TYPE_CHECKING:
    from kvquilt.store.files import Files


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found: each damaged file with its reason, and how many of them were removed.

    Attributes:
        unread: tiers that did not answer, so that nobody knows.
    """

    checked: int
    damaged: tuple[tuple[SegmentKey, MissReason], ...] = ()
    removed: int = 0
    unread: tuple[str, ...] = ()

    def __add__(self, other: VerifyReport) -> VerifyReport:
        """Of two tiers; a segment that is damaged in both counts twice."""
        return VerifyReport(
            self.checked + other.checked,
            self.damaged + other.damaged,
            self.removed + other.removed,
            self.unread + other.unread,
        )

    @property
    def reasons(self) -> Mapping[str, int]:
        return Counter(reason.value for _, reason in self.damaged)

    def repaired(self, removed: int) -> VerifyReport:
        return replace(self, removed=removed)


@dataclass(frozen=True, slots=True)
class GcReport:
    """What `gc` did: temporary files removed, files adopted, rows dropped, segments evicted."""

    temporaries: int = 0
    adopted: int = 0
    dropped: int = 0
    evicted: int = 0

    def evicting(self, count: int) -> GcReport:
        return replace(self, evicted=count)


def verify(files: Files) -> VerifyReport:
    checked, damaged = 0, []
    for key, _ in files.scan():
        try:
            content = memoryview(files.path(key).read_bytes())
            header = parse(content, content.nbytes)
            if header.key != key:
                raise DamageError(MissReason.SWAPPED)
            verify_checksum(content, header)
        except FileNotFoundError:
            continue
        except DamageError as damage:
            damaged.append((key, damage.reason))
        except OSError:
            damaged.append((key, MissReason.UNREADABLE))
        checked += 1
    return VerifyReport(checked, tuple(damaged))


def collect(files: Files, cursor: sqlite3.Cursor, listing: Iterable[tuple[SegmentKey, int, int]]) -> GcReport:
    """Sweep temporary files, adopt files without a row, drop rows without a file, correct sizes."""
    rows = _sizes(cursor)
    adopted = 0
    for key, tokens, size in listing:
        known = rows.pop(key, None)
        if known != size:
            index.put(cursor, key, tokens, size)
            adopted += known is None
    for key in rows:
        index.delete(cursor, key)
    return GcReport(temporaries=files.sweep(), adopted=adopted, dropped=len(rows))


def check_agreement(files: Files, cursor: sqlite3.Cursor, budget: int | None) -> None:
    """Raise `IntegrityError` with the first way in which rows, files and budget disagree."""
    rows, present = _sizes(cursor), dict(files.scan())
    for key, size in present.items():
        if key not in rows:
            raise IntegrityError(f"disk tier: {key} has a file and no index row; `kvquilt store gc` adopts it")
        if rows[key] != size:
            raise IntegrityError(f"disk tier: {key} is {size} bytes, the index says {rows[key]}")
    for key in rows:
        if key not in present:
            raise IntegrityError(f"disk tier: {key} has an index row and no file; `kvquilt store gc` drops it")
    if budget is not None and sum(rows.values()) > budget:
        raise IntegrityError(f"disk tier: holds {sum(rows.values())} bytes, its budget is {budget}")


def _sizes(cursor: sqlite3.Cursor) -> dict[SegmentKey, int]:
    query = "SELECT namespace, digest, bytes FROM segments"
    return {SegmentKey(space, digest): int(size) for space, digest, size in cursor.execute(query)}
