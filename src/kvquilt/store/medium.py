"""What a remote tier is told of a server: how to find, read, write, remove and list named bytes, and how to fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvquilt.identity import SegmentKey


class UnreachableError(Exception):
    """The server is not there, or hung up; never leaves `kvquilt.store`."""


class RefusedError(Exception):
    """The server answered and will not do it; `full`: for want of room. Never leaves `kvquilt.store`."""

    def __init__(self, what: str, *, full: bool = False) -> None:
        self.full = full
        super().__init__(what)


class Found(Protocol):
    """Something that stands under a key."""

    @property
    def size(self) -> int: ...

    async def read(self) -> memoryview | None:
        """Its bytes; None where it went meanwhile."""
        ...


class Medium(Protocol):
    """A server that keeps bytes under keys for as long as it likes.

    Everything runs in one event loop, may be cancelled at any point, and raises `UnreachableError` or `RefusedError`.
    Deadlines are the caller's. `name` is the tier's, `place` what people read, without secrets.
    """

    name: str
    place: str

    async def find(self, keys: Sequence[SegmentKey]) -> Sequence[Found | None]: ...

    async def write(self, key: SegmentKey, parts: Sequence[memoryview]) -> None: ...

    async def remove(self, key: SegmentKey) -> bool:
        """Whether there was something."""
        ...

    def list(self, namespace: str | None) -> AsyncIterator[tuple[SegmentKey, int]]:
        """Keys and sizes; what comes or goes meanwhile may or may not be there."""
        ...

    async def ping(self) -> None:
        """Raise unless the server answers."""
        ...

    async def close(self) -> None: ...
