"""What the account of an answer must be in a line of a run: fields as `kvquilt.ledger` writes them."""

from __future__ import annotations

from pydantic import Field

from kvquilt.evaluation.run.forms import Exactly
from kvquilt.ledger import Provenance


class _Use(Exactly):
    id: str
    tokens: int
    start: int
    provenance: str = Field(pattern=f"^({'|'.join(Provenance)})$")
    source: str
    why: str
    recomputed: int


class _Fallback(Exactly):
    reason: str
    detail: str


class _Spending(Exactly):
    tokens: int
    layers: int
    allowed: int | None
    rows: int
    probe: int
    repair: int
    first: int = 0
    last: int | None = None


class _Tokens(Exactly):
    exact: int
    reused: int
    recomputed: int
    corrected: int
    absent: int
    inline: int


class LedgerForm(Exactly):
    """A `Ledger` without its seconds, which are the line's own."""

    method: str
    asked: str
    tokens: _Tokens
    forward_tokens: dict[str, int]
    token_layers: int
    bytes_read: dict[str, int]
    flops: float = Field(gt=0)
    flops_full: float
    fallbacks: list[_Fallback]
    documents: list[_Use]
    spending: _Spending | None
    gate: str
    model: str
    threads: int
    writer: str
    soft_rows: int = 0
