"""Until when a request is worth answering, and whose word that is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Self

from kvquilt.server.failures import RefusalError


@dataclass(frozen=True, slots=True)
class Deadline:
    """
    Attributes:
        at: in the running loop's time.
        own: the client's word, which only it can change; else the server's.
    """

    at: float
    own: bool

    @classmethod
    def of(cls, own: float | None, limit: float) -> Self:
        """From now, the sooner of what the client gives and what the server does; seconds."""
        sooner = own is not None and own < limit
        return cls(asyncio.get_running_loop().time() + (own if own is not None and sooner else limit), sooner)

    def missed(self, rule: str, retry_after: int | None = None) -> RefusalError:
        return RefusalError(408 if self.own else 504, "deadline_exceeded", rule, retry_after=retry_after)
