"""What every tier of the store promises: small immutable answers and the `Tier` protocol."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # `kvquilt store ls` must not wait for torch
    import torch

    from kvquilt.identity import SegmentKey
    from kvquilt.segment import CompiledSegment

    Asked = tuple[SegmentKey, tuple[int, ...], "Layout | None"]


class MissReason(StrEnum):
    """Why a tier has nothing to give for a key."""

    ABSENT = "absent"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    SWAPPED = "swapped"  # a sound file of another segment under this name
    WRONG_VERSION = "wrong_version"
    WRONG_DTYPE = "wrong_dtype"
    WRONG_SHAPE = "wrong_shape"
    SIDE_DATA_MISSING = "side_data_missing"  # sound, but without something its reader needs
    COLLISION = "collision"  # the same digest, other token ids
    UNREADABLE = "unreadable"  # the operating system, or a server, refused the read
    TOO_LARGE = "too_large"  # longer than a remote tier is allowed to read
    TIMEOUT = "timeout"  # the server did not answer within the deadline
    UNREACHABLE = "unreachable"  # there is no server, or it hung up
    NOT_ASKED = "not_asked"  # it did not answer lately, so it is left alone for a while

    @property
    def unanswered(self) -> bool:
        """Whether the tier may well have it: nobody knows."""
        return self in (MissReason.TIMEOUT, MissReason.UNREACHABLE, MissReason.NOT_ASKED)


class FailureReason(StrEnum):
    """Why a tier did not keep a segment."""

    OVER_BUDGET = "over_budget"
    OVER_QUOTA = "over_quota"  # larger than all that its namespace may take
    HELD = "held"  # room could be made only by evicting held segments
    NO_SPACE = "no_space"
    READ_ONLY = "read_only"
    DENIED = "denied"
    INDEX = "index"
    IO_ERROR = "io_error"
    TOO_LARGE = "too_large"
    QUEUE_FULL = "queue_full"  # more waits to be written than may wait
    REFUSED = "refused"  # the server answered and would not do it
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    NOT_ASKED = "not_asked"
    UNFINISHED = "unfinished"  # still waiting when the tier was closed


def failure_reason(error: OSError) -> FailureReason:
    """What an operating system's refusal to write means."""
    return _REASONS.get(error.errno or 0, FailureReason.IO_ERROR)


_REASONS = {
    errno.ENOSPC: FailureReason.NO_SPACE,
    errno.EDQUOT: FailureReason.NO_SPACE,
    errno.EROFS: FailureReason.READ_ONLY,
    errno.EACCES: FailureReason.DENIED,
    errno.EPERM: FailureReason.DENIED,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model can attend to, and what a method needs beside: a segment of any other layout is a miss.

    Attributes:
        side: names of the side data that the segment must have; more is welcome.
    """

    dtype: torch.dtype
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    side: frozenset[str] = frozenset()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token."""
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @classmethod
    def of(cls, segment: CompiledSegment) -> Layout:
        layers, kv_heads, _, key_dim = segment.keys.shape
        value_dim = segment.values.shape[-1]
        return cls(segment.keys.dtype, layers, kv_heads, key_dim, value_dim, frozenset(segment.side))

    def refusal(self, segment: CompiledSegment) -> MissReason | None:
        """Why `segment` does not fit this layout, or None."""
        other = Layout.of(segment)
        if other.dtype != self.dtype:
            return MissReason.WRONG_DTYPE
        if replace(other, side=self.side) != self:
            return MissReason.WRONG_SHAPE
        return None if self.side <= other.side else MissReason.SIDE_DATA_MISSING


@dataclass(frozen=True, slots=True)
class Hit:
    """The segment, and how many of its bytes the tier supplied."""

    segment: CompiledSegment
    bytes_read: int


@dataclass(frozen=True, slots=True)
class Miss:
    reason: MissReason


@dataclass(frozen=True, slots=True)
class Stored:
    """The segment is kept and takes this many bytes of the tier's budget."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The segment was not kept; whatever was stored before still is."""

    reason: FailureReason


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds now, and what it counted since it was opened by this process.

    Attributes:
        segments, bytes: None where only a walk through everything would tell.
        integrity_failures: misses for what was not as it was put: truncated, corrupt, swapped, another's ids.
        waiting: writes that a remote tier has accepted and not yet sent.
        breaker: ``closed`` while a remote tier is asked, else ``open`` or ``half_open``; "" for a local one.
    """

    segments: int | None
    bytes: int | None
    budget: int | None
    hits: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    evictions: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    pinned: int = 0
    integrity_failures: int = 0
    waiting: int = 0
    breaker: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One stored segment, as listings show it; times are seconds since the epoch.

    Attributes:
        tokens: None where the segment would have to be read for it.
    """

    key: SegmentKey
    tokens: int | None
    bytes: int
    frequency: int
    last_use: float


@runtime_checkable
class Tier(Protocol):
    """One place where compiled segments are kept. Every method may be called from any thread.

    A tier never raises for damage or a full medium: a read is a `Miss`, a write a `Failure`, both counted.

    Attributes:
        lasting: whether it keeps a segment until its own budget or somebody removes it. A server that others use and
            that forgets as it likes does not; its `put` answers `Stored` when the write waits to be sent, what becomes
            of it is counted, and its listings raise `StoreUnavailableError` rather than be incomplete.
    """

    lasting: bool = True

    @property
    def name(self) -> str: ...

    def get(self, key: SegmentKey, ids: tuple[int, ...], layout: Layout | None = None) -> Hit | Miss:
        """The segment under `key`, if its token ids are `ids` and it fits `layout` (where given)."""
        ...

    def get_many(self, wanted: Sequence[Asked]) -> list[Hit | Miss]:
        """`get` of several at once, in order, for where one trip costs less than many."""
        return [self.get(*each) for each in wanted]

    def put(self, key: SegmentKey, segment: CompiledSegment) -> Stored | Failure:
        """Keep `segment`, replacing what stands under `key`; evict the least useful others if need be."""
        ...

    def touch(self, key: SegmentKey) -> None:
        """Count a use of `key` that a faster tier served, so that a hot segment is not cold here."""
        ...

    def remove(self, key: SegmentKey) -> bool:
        """Forget `key`; False if it was not there. A segment already handed out stays valid."""
        ...

    def contains(self, key: SegmentKey) -> bool:
        """Whether something stands under `key`; neither verified nor counted as a use."""
        ...

    def keys(self, namespace: str | None = None) -> Iterator[SegmentKey]:
        """Keys of one namespace, or of all."""
        ...

    def rows(self, namespace: str | None = None) -> Iterator[Row]:
        """The listing behind `keys`, with sizes and use."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Bytes by namespace; of a tier that does not know, nothing."""
        return {}

    def pin(self, key: SegmentKey) -> AbstractContextManager[None]:
        """While the context is open, `key` is not evicted, whether it is already there or arrives meanwhile."""
        ...

    def stats(self) -> TierStats: ...

    def check_integrity(self) -> None:
        """Raise `IntegrityError` with the first broken invariant."""
        ...

    def close(self) -> None: ...
