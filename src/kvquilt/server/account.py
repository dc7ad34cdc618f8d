"""A ledger as responses carry it: what became of every document, and what that cost."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvquilt.answer import Answer
from kvquilt.ledger import Ledger, Provenance

_KEPT = (
    "method", "asked", "gate", "writer", "tokens", "forward_tokens", "bytes_read", "seconds", "flops", "flops_full",
    "fallbacks",
)  # fmt: skip
CACHED = (Provenance.EXACT, Provenance.REUSED, Provenance.CORRECTED)


def cached_tokens(ledger: Ledger) -> int:
    """Prompt tokens that no layer computed in this request; one recomputed layer makes a token not cached."""
    return sum(ledger.tokens[kind] for kind in CACHED)


def account(answer: Answer, explain: bool = False) -> dict[str, Any]:
    """The field ``kvquilt`` of a response. Ids and numbers, no text of a document."""
    ledger = answer.ledger
    full = ledger.as_dict()
    out = {name: full[name] for name in _KEPT}
    spent = ledger.spending
    out["spending"] = None if spent is None else {**asdict(spent), "charged": spent.charged}
    out["charged_share"] = 0.0 if spent is None else spent.charged_share
    out["reused_share"] = ledger.reused_share
    out["stop_reason"] = answer.stop_reason
    out["documents"] = full["documents"]
    out["runs"] = [asdict(run) for run in ledger.runs]
    if explain:
        out["explain"] = ledger.table()
    return out
