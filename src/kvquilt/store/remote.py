"""The remote tier: segments on a server that may be slow, dead, full or wrong, and never costs more than a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from kvquilt.errors import IntegrityError
from kvquilt.remote import Limits, Remote
from kvquilt.store.base import Failure, FailureReason, Hit, Layout, Miss, MissReason, Row, Stored, Tier, TierStats
from kvquilt.store.counts import Counts
from kvquilt.store.format import DamageError, Header, decode, encode, pack_ids, parse, verify_checksum
from kvquilt.store.line import Line, NoAnswerError
from kvquilt.store.maintenance import VerifyReport
from kvquilt.store.medium import Found, Medium
from kvquilt.store.outbox import Outbox
from kvquilt.store.s3 import S3Medium
from kvquilt.store.valkey import ValkeyMedium

if TYPE_CHECKING:
    from kvquilt.identity import SegmentKey
    from kvquilt.segment import CompiledSegment
    from kvquilt.store.base import Asked

log = logging.getLogger(__name__)
_PARALLEL = 4  # transfers at a time
_LISTING_SECONDS = 60.0
# What is wrong with the bytes themselves, for whoever reads them.
_DAMAGE = (MissReason.TRUNCATED, MissReason.CORRUPT, MissReason.SWAPPED, MissReason.WRONG_VERSION)


class RemoteTier(Tier):
    """Segments on `medium`, in the very bytes of the disk tier's files, each verified whenever it is read.

    A server that does not answer is a counted miss, and is then left alone (see `Breaker`) until it answers a question
    in the background. What is damaged is a miss and removed. A checksum finds damage, not malice: whoever may write to
    the server can put other keys and values there.

    Writes go through a bounded queue in the background. What others use is evicted as the server likes, so nothing
    here counts on what was put, and segments and bytes are not known.
    """

    lasting = False

    def __init__(self, medium: Medium, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._medium = medium
        self._counts = Counts()
        self._line = Line(medium, self.limits)
        self._outbox = Outbox(self._send, self.limits.queue_bytes)

    @property
    def name(self) -> str:
        return self._medium.name

    def get(self, key: SegmentKey, ids: tuple[int, ...], layout: Layout | None = None) -> Hit | Miss:
        return self.get_many([(key, ids, layout)])[0]

    def get_many(self, wanted: Sequence[Asked]) -> list[Hit | Miss]:
        """All within one deadline for the look-up, and one for the transfer; what came by then is a hit."""
        try:
            found = self._line.call(self._medium.find([key for key, _, _ in wanted]), self.limits.deadline)
        except NoAnswerError as error:
            return [self._counts.miss(error.miss) for _ in wanted]
        bodies: dict[int, memoryview | None] = {}
        coming = {i: each for i, each in enumerate(found) if each is not None and each.size <= self.limits.max_bytes}
        late = MissReason.ABSENT
        if coming:
            try:
                self._line.call(_read(coming, bodies), self._transfer(self.limits.deadline, coming.values()))
            except NoAnswerError as error:
                late = error.miss
        arrived: dict[int, memoryview | None] = dict(bodies)  # a transfer that is being cancelled adds no more
        answers: list[Hit | Miss] = []
        for i, each in enumerate(wanted):
            body = arrived.get(i)
            if body is not None:
                answers.append(self._opened(each, body))
            elif found[i] is not None and i not in coming:
                answers.append(self._counts.miss(MissReason.TOO_LARGE))
            else:
                answers.append(self._counts.miss(late if i in coming and i not in arrived else MissReason.ABSENT))
        return answers

    def put(self, key: SegmentKey, segment: CompiledSegment) -> Stored | Failure:
        parts = encode(key, segment)
        size = sum(part.nbytes for part in parts)
        if size > self.limits.max_bytes:
            return self._counts.failure(FailureReason.TOO_LARGE)
        if not self._line.breaker.closed:
            return self._counts.failure(FailureReason.NOT_ASKED)
        if not self._outbox.offer(key, parts):
            return self._counts.failure(FailureReason.QUEUE_FULL)
        return Stored(size)

    def touch(self, key: SegmentKey) -> None:
        """Nothing: to tell the server of every use that memory served would cost more than the segment."""

    def remove(self, key: SegmentKey) -> bool:
        self._outbox.discard(key, self.limits.write_deadline)
        try:
            return self._line.call(self._medium.remove(key), self.limits.deadline)
        except NoAnswerError as error:
            self._counts.failure(error.failure)
            return False

    def contains(self, key: SegmentKey) -> bool:
        """Whether the server says so; False where it does not answer."""
        try:
            return self._line.call(self._medium.find([key]), self.limits.deadline)[0] is not None
        except NoAnswerError:
            return False

    def keys(self, namespace: str | None = None) -> Iterator[SegmentKey]:
        return (key for key, _ in self._list(namespace))

    def rows(self, namespace: str | None = None) -> Iterator[Row]:
        return (Row(key, None, size, 0, 0.0) for key, size in self._list(namespace))

    def pin(self, key: SegmentKey) -> AbstractContextManager[None]:
        """Nothing: what was read is a copy, and the server evicts as it likes."""
        return nullcontext()

    def stats(self) -> TierStats:
        return self._counts.stats(None, None, None, 0, len(self._outbox), self._line.breaker.state.value)

    @property
    def place(self) -> str:
        """The server's URL, without secrets."""
        return self._medium.place

    def answers(self) -> bool:
        """Ask the server now."""
        try:
            self._line.call(self._medium.ping(), self.limits.deadline)
        except NoAnswerError:
            return False
        return True

    def check_integrity(self) -> None:
        """The books of what waits to be written are right. What the server holds is the business of `verify`."""
        wrong = self._outbox.check()
        if wrong:
            raise IntegrityError(f"{self.name} tier: {wrong}")

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Read everything the server has of us and check every bit; with `repair`, damaged segments are removed.

        Raises:
            StoreUnavailableError: the server did not answer, or not in time.
        """
        damaged, removed, checked = [], 0, 0
        for key in self.keys():
            (found,) = self._line.insist(self._medium.find([key]), self.limits.write_deadline)
            if found is None:
                continue
            body = self._line.insist(found.read(), self._transfer(self.limits.write_deadline, [found]))
            if body is None:
                continue
            checked += 1
            try:
                _sound(key, body)
            except DamageError as damage:
                damaged.append((key, damage.reason))
                removed += repair and self._line.insist(self._medium.remove(key), self.limits.write_deadline)
        return VerifyReport(checked, tuple(damaged), removed)

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until everything accepted was sent, successfully or not; whether that was reached in time."""
        return self._outbox.flush(self.limits.flush if seconds is None else seconds)

    def close(self) -> None:
        """Flush within its deadline; what is left then is given up and counted."""
        left = self._outbox.close(self.limits.flush)
        if left:
            self._counts.failure(FailureReason.UNFINISHED, left)
            log.warning("remote tier %s: closed with %d segments unwritten", self.place, left)
        self._line.close()

    def _opened(self, wanted: Asked, body: memoryview) -> Hit | Miss:
        import torch

        key, ids, layout = wanted
        content = torch.empty(body.nbytes, dtype=torch.uint8)  # aligned, and nobody else's
        raw = content.numpy().data
        raw[:] = body
        try:
            header = _sound(key, raw)
            segment = decode(content, header, ids)
            refusal = layout.refusal(segment) if layout is not None else None
            if refusal is not None:
                raise DamageError(refusal)
            if raw[header.ids_at : header.ids_end] != pack_ids(ids):
                raise DamageError(MissReason.COLLISION)
        except DamageError as damage:
            if damage.reason in _DAMAGE:  # anything else is sound for somebody
                self._outbox.offer(key, None)
            return self._counts.miss(damage.reason)
        self._counts.hit()
        return Hit(segment, segment.nbytes)

    def _send(self, key: SegmentKey, parts: Sequence[memoryview] | None) -> None:
        """What the outbox does: write the parts, or remove the key."""
        seconds = self.limits.write_deadline
        try:
            if parts is None:
                self._line.call(self._medium.remove(key), seconds)
            else:
                size = sum(part.nbytes for part in parts)
                self._line.call(self._medium.write(key, parts), seconds + size / self.limits.rate)
        except NoAnswerError as error:
            self._counts.failure(error.failure)

    def _list(self, namespace: str | None) -> Iterator[tuple[SegmentKey, int]]:
        async def collect() -> list[tuple[SegmentKey, int]]:
            return [each async for each in self._medium.list(namespace)]

        return iter(self._line.insist(collect(), _LISTING_SECONDS))

    def _transfer(self, deadline: float, coming: Iterable[Found]) -> float:
        return deadline + sum(each.size for each in coming) / self.limits.rate


def open_remote(remote: Remote | str) -> RemoteTier:
    """The tier that a URL names; see `Remote.parse`. Nothing is connected yet.

    Raises:
        InputError: it is no such URL, or what reads it is not installed.
    """
    place = remote if isinstance(remote, Remote) else Remote.parse(remote)
    return RemoteTier(S3Medium(place) if place.scheme == "s3" else ValkeyMedium(place), place.limits)


async def _read(coming: dict[int, Found], bodies: dict[int, memoryview | None]) -> None:
    """Read several at a time into `bodies`, so that what has come is there when the rest is given up."""
    free = asyncio.Semaphore(_PARALLEL)

    async def one(i: int, found: Found) -> None:
        async with free:
            bodies[i] = await found.read()

    ends = await asyncio.gather(*(one(i, found) for i, found in coming.items()), return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end


def _sound(key: SegmentKey, content: memoryview) -> Header:
    """The header of a whole, undamaged file of this key; raises `DamageError`."""
    header = parse(content, content.nbytes)
    if header.key != key:
        raise DamageError(MissReason.SWAPPED)
    verify_checksum(content, header)
    return header
