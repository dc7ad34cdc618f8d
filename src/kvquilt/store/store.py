"""The store: tiers over each other, and the one verb that fetches, compiles what is missing, and holds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquilt.errors import InputError, IntegrityError, StoreError, StoreUnavailableError
from kvquilt.remote import Remote
from kvquilt.store.base import Failure, FailureReason, Hit, Layout, Miss, MissReason, Row, Stored, Tier, TierStats
from kvquilt.store.disk import DiskTier
from kvquilt.store.flights import Boarding, Flights
from kvquilt.store.maintenance import GcReport, VerifyReport
from kvquilt.store.memory import MemoryTier
from kvquilt.store.notes import Notes
from kvquilt.store.quotas import Quoting
from kvquilt.store.remote import RemoteTier, open_remote

if TYPE_CHECKING:
    from types import TracebackType

    from kvquilt.identity import SegmentKey
    from kvquilt.segment import CompiledSegment

    Wanted = tuple[SegmentKey, tuple[int, ...]]
    Compile = Callable[[list[int]], Iterable[tuple[int, CompiledSegment]]]

COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class Held:
    """One wanted segment, valid and not evicted while its `fetch` is open.

    Attributes:
        segment: None only in a look-up without `compile`.
        tier: the name of the tier that had it, "compiled", or None where it is missing.
        bytes_read: its bytes, supplied by the tier; 0 for a compiled or missing one.
        reason: why no tier had it (a `MissReason`), "" where one had.
    """

    segment: CompiledSegment | None
    tier: str | None
    bytes_read: int = 0
    reason: str = ""


class Store:
    """Tiers, fastest first. Safe from any thread; the disk tier is also shared between processes.

    Damage, a full disk or a tier that fails is a counted miss or failure (see `stats`), never an error here.
    """

    def __init__(self, *tiers: Tier) -> None:
        self.tiers = tiers
        self.memory = next((tier for tier in tiers if isinstance(tier, MemoryTier)), None)
        self.disk = next((tier for tier in tiers if isinstance(tier, DiskTier)), None)
        self.remote = next((tier for tier in tiers if isinstance(tier, RemoteTier)), None)
        self._lasting = next((tier for tier in reversed(tiers) if tier.lasting), None)
        self._notes = Notes(self.disk.files if self.disk else None)
        self._flights = Flights()
        self._lock = threading.Lock()
        self._open_fetches = 0
        self._errors: dict[str, tuple[Counter[str], Counter[str]]] = {t.name: (Counter(), Counter()) for t in tiers}

    @classmethod
    def open(
        cls,
        directory: Path | str | None,
        memory_bytes: int,
        disk_bytes: int | None = None,
        remote: Remote | str | None = None,
    ) -> Store:
        """A memory tier over a disk tier in `directory` (memory alone where it is None), over a remote one if named.

        Args:
            remote: see `Remote.parse`. A server that is not there is no error, neither here nor later.

        Raises:
            StoreUnavailableError: the directory cannot be created or read, or is of another version.
            InputError: `remote` is no such URL, or what reads it is not installed.
        """
        for name, value in (("memory_bytes", memory_bytes), ("disk_bytes", disk_bytes)):
            if value is not None and value < 0:
                raise InputError(name, "a number of bytes, at least 0", value)
        tiers: list[Tier] = [MemoryTier(memory_bytes)]
        if remote is not None:  # before anything is opened that would have to be closed
            tiers.append(open_remote(remote))
        if directory is not None:
            tiers.insert(1, DiskTier(Path(directory), disk_bytes))
        return cls(*tiers)

    def quote(self, quoting: Quoting) -> None:
        """Hold every namespace to its quota, in each local tier, from now on; `quoting` is asked at every write.

        Other processes on the same directory are not held to it.
        """
        for tier in (self.memory, self.disk):
            if tier is not None:
                tier.quote(quoting)

    @contextmanager
    def fetch(
        self,
        wanted: Sequence[Wanted],
        compile: Compile | None = None,
        layout: Layout | Sequence[Layout] | None = None,
    ) -> Iterator[list[Held]]:
        """Hold every wanted segment, in order, until the context ends.

        Args:
            wanted: keys and their token ids; the same one may stand there twice.
            compile: given the indices (into `wanted`) of what no tier has, yields ``(index, segment)`` for each,
                in any order. Every segment is stored as it comes, so an interruption keeps what is finished.
                What another thread is compiling is waited for; if that fails, it is compiled here, in a further
                call. None: look up only.
            layout: what the model and the method need, of all or one for each of `wanted`; anything else is a miss.

        Raises:
            StoreError: `compile` did not deliver what it was asked for. Its own exceptions pass through.
        """
        layouts = _layouts(wanted, layout)
        with ExitStack() as holds:
            self._count_fetch(1)
            holds.callback(self._count_fetch, -1)
            for key in {key: None for key, _ in wanted}:
                for tier in self.tiers:
                    holds.enter_context(tier.pin(key))
            found: dict[Wanted, Held] = {}
            if compile is None:
                reasons = self._look_up(list(dict.fromkeys(wanted)), layouts, found)
                found |= {each: Held(None, None, reason=reason) for each, reason in reasons.items()}
            while missing := [each for each in dict.fromkeys(wanted) if each not in found]:
                with self._flights.board(key for key, _ in missing) as boarding:
                    mine = [each for each in missing if each[0] not in boarding.others]
                    reasons = self._look_up(mine, layouts, found, boarding)
                    if reasons and compile is not None:
                        self._compile(wanted, reasons, compile, layouts, found, boarding)
                for each in missing:
                    if flight := boarding.others.get(each[0]):
                        flight.landed.wait()
                        segment = flight.segment
                        if segment is not None and segment.ids == each[1] and _fits(segment, layouts[each]):
                            found[each] = Held(segment, self.tiers[0].name if self.tiers else None, segment.nbytes)
            yield [found[each] for each in wanted]

    def contains(self, key: SegmentKey) -> bool:
        """Whether any tier has something under `key`, verified or not."""
        return any(tier.contains(key) for tier in self.tiers)

    def keeps(self, key: SegmentKey) -> bool:
        """Whether the slowest lasting tier, which outlives the others, has something under `key`."""
        return self._lasting is not None and self._lasting.contains(key)

    def put(self, key: SegmentKey, segment: CompiledSegment) -> dict[str, Stored | Failure]:
        """Store in all tiers; the answer of each by name."""
        return {tier.name: self._put(tier, key, segment) for tier in self.tiers}

    def stats(self) -> dict[str, TierStats]:
        """Per tier, what it holds and what it counted."""
        result = {}
        for tier in self.tiers:
            stats = tier.stats()
            misses, failures = self._errors[tier.name]
            merged = Counter(stats.misses) + misses, Counter(stats.failures) + failures
            result[tier.name] = replace(stats, misses=dict(merged[0]), failures=dict(merged[1]))
        return result

    def check_integrity(self) -> None:
        """Raise `IntegrityError` naming the first broken invariant of any tier, or holds that nobody has."""
        for tier in self.tiers:
            tier.check_integrity()
            with self._lock:
                pinned = 0 if self._open_fetches else tier.stats().pinned
            if pinned:
                raise IntegrityError(f"{tier.name} tier: {pinned} segments are pinned and nothing is held")
        if not self._open_fetches and self._flights.open:
            raise IntegrityError(f"store: {len(self._flights.open)} segments are under way and nobody fetches")

    def ls(self, namespace: str | None = None) -> list[Row]:
        """What the slowest, most complete lasting tier has."""
        return list(self._lasting.rows(namespace)) if self._lasting is not None else []

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Re-read every file and all that a remote tier has, and check every bit; with `repair`, damaged ones go.

        A remote tier that does not answer is named in the report's `unread`.
        """
        report = VerifyReport(0) if self.disk is None else self.disk.verify(repair=repair)
        if repair and self.memory is not None:
            for key, _ in report.damaged:  # a mapped segment shows its file's damage
                self.memory.remove(key)
        if self.remote is not None:
            try:
                report += self.remote.verify(repair=repair)
            except StoreUnavailableError:
                report += VerifyReport(0, unread=(self.remote.name,))
        return report

    def gc(self) -> GcReport:
        """Remove abandoned temporary files, bring index and files together, shrink to the budget."""
        return self.disk.gc() if self.disk else GcReport()

    def rm(self, *, namespace: str | None = None, key: SegmentKey | None = None, everything: bool = False) -> int:
        """Remove one segment, one namespace with its notes, or everything; returns how many segments went.

        Raises:
            StoreUnavailableError: a remote tier did not say what it has; what the others have is gone.
        """
        if (namespace is not None) + (key is not None) + everything != 1:
            raise InputError("rm", "name exactly one of namespace, key, everything")
        if key is not None:
            return self._remove({key})
        keys: set[SegmentKey] = set()
        unlisted = None
        for tier in self.tiers:
            try:
                keys.update(tier.keys(namespace))
            except StoreUnavailableError as error:
                unlisted = error
        gone = self._remove(keys)
        self._notes.remove(namespace)
        if unlisted is not None:
            raise unlisted
        return gone

    def flush(self) -> bool:
        """Wait until what is written in the background is written; whether that was reached within its deadline."""
        return self.remote is None or self.remote.flush()

    def clear_memory(self) -> None:
        """Forget what the memory tier has and nobody holds."""
        if self.memory is not None:
            self.memory.clear()

    def write_note(self, namespace: str, name: str, content: Mapping[str, Any]) -> Stored | Failure:
        """Keep a small JSON document beside the namespace's segments, replacing it atomically."""
        return self._notes.write(namespace, name, content)

    def read_note(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The note, or None where there is none that can be trusted."""
        return self._notes.read(namespace, name)

    def forget_note(self, namespace: str, name: str) -> bool | Failure:
        """Remove the note; whether there was one."""
        return self._notes.forget(namespace, name)

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look_up(
        self,
        wanted: list[Wanted],
        layouts: Mapping[Wanted, Layout | None],
        found: dict[Wanted, Held],
        boarding: Boarding | None = None,
    ) -> dict[Wanted, str]:
        """Fill `found` from the tiers; returns why the others are missing. Memory goes first for all of them."""
        reasons = dict.fromkeys(wanted, MissReason.ABSENT.value)
        for level, tier in enumerate(self.tiers):
            for each, answer in self._get(tier, list(reasons), layouts):
                if isinstance(answer, Miss):
                    # what a tier has and cannot use says more than another's silence
                    known = answer.reason is not MissReason.ABSENT and not answer.reason.unanswered
                    if known or reasons[each] == MissReason.ABSENT:
                        reasons[each] = answer.reason.value
                    continue
                for faster in self.tiers[:level]:
                    self._put(faster, each[0], answer.segment)
                for slower in self.tiers[level + 1 :]:
                    slower.touch(each[0])
                del reasons[each]
                found[each] = Held(answer.segment, tier.name, answer.bytes_read)
                if boarding is not None:
                    boarding.land(each[0], answer.segment)
        return reasons

    def _compile(
        self,
        wanted: Sequence[Wanted],
        reasons: dict[Wanted, str],
        compile: Compile,
        layouts: Mapping[Wanted, Layout | None],
        found: dict[Wanted, Held],
        boarding: Boarding,
    ) -> None:
        asked = {wanted.index(each): each for each in reasons}
        for index, segment in compile(list(asked)):
            each = asked.get(index)
            if each is None or segment.ids != each[1]:
                raise StoreError(f"compile yielded a segment for index {index} that was not asked of it")
            if not _fits(segment, layouts[each]):  # stored, it would be a miss for ever
                raise StoreError(f"compile yielded a segment for index {index} that does not have what was asked for")
            self.put(each[0], segment)
            found[each] = Held(segment, COMPILED, reason=reasons[each])
            boarding.land(each[0], segment)
        undone = [index for index, each in asked.items() if each not in found]
        if undone:
            raise StoreError(f"compile yielded nothing for indices {undone}")

    def _get(
        self, tier: Tier, wanted: Sequence[Wanted], layouts: Mapping[Wanted, Layout | None]
    ) -> list[tuple[Wanted, Hit | Miss]]:
        if not wanted:
            return []
        try:
            answers = tier.get_many([(*each, layouts[each]) for each in wanted])
        except OSError:
            if len(wanted) > 1:  # one of them cannot be read, and nobody knows which
                return [answer for each in wanted for answer in self._get(tier, [each], layouts)]
            with self._lock:
                self._errors[tier.name][0][MissReason.UNREADABLE.value] += 1
            answers = [Miss(MissReason.UNREADABLE)]
        return list(zip(wanted, answers, strict=True))

    def _remove(self, keys: set[SegmentKey]) -> int:
        """Remove `keys` from all tiers; how many any of them had."""
        return sum(sum([tier.remove(each) for tier in self.tiers]) > 0 for each in keys)

    def _put(self, tier: Tier, key: SegmentKey, segment: CompiledSegment) -> Stored | Failure:
        try:
            return tier.put(key, segment)
        except OSError:
            with self._lock:
                self._errors[tier.name][1][FailureReason.IO_ERROR.value] += 1
            return Failure(FailureReason.IO_ERROR)

    def _count_fetch(self, change: int) -> None:
        with self._lock:
            self._open_fetches += change


def _layouts(wanted: Sequence[Wanted], layout: Layout | Sequence[Layout] | None) -> dict[Wanted, Layout | None]:
    """What each segment must look like; one that is wanted twice must have the side data of both."""
    if layout is None or isinstance(layout, Layout):
        return dict.fromkeys(wanted, layout)
    needs: dict[Wanted, Layout | None] = {}
    for each, new in zip(wanted, layout, strict=True):
        before = needs.get(each)
        needs[each] = new if before is None else replace(new, side=new.side | before.side)
    return needs


def _fits(segment: CompiledSegment, layout: Layout | None) -> bool:
    return layout is None or layout.refusal(segment) is None
