"""What is noted of a request on its way, for the line in the log and the metrics; never a text or a key."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from kvquilt.answer import Answer
from kvquilt.ledger import Ledger

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
ID_HEADER, TRACE_HEADERS = "x-request-id", ("traceparent", "tracestate")


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        id: the client's own ``x-request-id`` where it is a plain word, else a random one.
        tenant: whose key it had; None without keys.
        fault: code of what it was refused with, or the exception's name.
        facts: numbers of the answer.
        ledger: of the answer, once it has ended.
        admitted: when its prompt's turn came; 0 before. On the clock of `began`.
        trace: headers that say of which trace it is part, as they came.
    """

    method: str
    path: str
    id: str
    tenant: str | None = None
    status: int = 0
    fault: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    ledger: Ledger | None = None
    began: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    trace: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, scope: Scope) -> Record:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(ID_HEADER, "")
        trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        id = given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        return cls(scope["method"], "", id, trace=trace)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def answered(self, answer: Answer) -> None:
        """Note what an answer cost."""
        self.ledger = ledger = answer.ledger
        self.facts |= {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.token_ids),
            "reused_share": round(ledger.reused_share, 4),
            "asked": ledger.asked,
            "ran": ledger.method,
            "stop_reason": answer.stop_reason,
            "first_token": round(ledger.seconds.get("first_token", 0.0), 4),
            "fallbacks": [str(each.reason) for each in ledger.fallbacks],
        }


def record_of(request: Request) -> Record:
    found: Record = request.scope["state"]["record"]
    return found
