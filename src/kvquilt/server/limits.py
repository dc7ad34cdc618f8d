"""What one server takes on at most."""

from __future__ import annotations

from dataclasses import dataclass

from kvquilt.errors import InputError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of memory, time and queue; every one is a refusal with its reason, never a slower server.

    Attributes:
        streams: answers that decode at the same time.
        queue: requests that wait for a place among them, of all tenants.
        cache_bytes: keys and values of all requests that are being answered, room for their answers included.
        deadline: seconds from a request's arrival to its last token.
        body_bytes: of one request; an upload of many documents, a line each, may be longer as a whole.
        documents: in one prompt; `stored` by one tenant, whose texts may have `text_bytes`.
        depth: nested lists and objects in a body; `values` in it, of all levels.
        grace: seconds that running answers get when the server is told to stop.

    Raises:
        InputError: naming a field that is not above 0.
    """

    streams: int = 8
    queue: int = 64
    cache_bytes: int = 4 << 30
    deadline: float = 600.0
    body_bytes: int = 16 << 20
    documents: int = 256
    stored: int = 20_000
    text_bytes: int = 1 << 30
    depth: int = 32
    values: int = 100_000
    grace: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise InputError(name, "must be above 0", getattr(self, name))
