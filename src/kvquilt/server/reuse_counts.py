"""What the answers of one tenant reused since the server began, and how fast it reads a whole prompt."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from kvquilt.ledger import Ledger, Provenance
from kvquilt.repair.written import split

_LAST = 16  # full prefills: what was measured long ago says little about now


@dataclass(eq=False, slots=True)
class ReuseCounts:
    """Of one event loop, from which alone it is used.

    Attributes:
        tokens: of prompts, by provenance.
        sources: documents by where their keys and values came from, as `DocumentUse.source` has it.
    """

    answers: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    _full: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_LAST), repr=False)

    def add(self, ledger: Ledger) -> None:
        """Count a finished answer."""
        self.answers += 1
        self.tokens.update({str(kind): count for kind, count in ledger.tokens.items()})
        self.sources.update(use.source for use in ledger.documents)
        if split(ledger.method)[0] == "full" and ledger.flops_full and "first_token" in ledger.seconds:
            self._full.append((ledger.seconds["first_token"], ledger.flops_full))

    @property
    def seconds_per_flop(self) -> float | None:
        """Of the last full prefills, to their first token; None before there was one."""
        flops = sum(each for _, each in self._full)
        return sum(seconds for seconds, _ in self._full) / flops if flops else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "tokens": {str(kind): self.tokens[kind] for kind in Provenance},
            "sources": dict(self.sources),
            "full_prefill": {"measured": len(self._full), "seconds_per_flop": self.seconds_per_flop},
        }
