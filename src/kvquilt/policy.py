"""Which method runs: what was asked for, held against the gate's verdict."""

from __future__ import annotations

from kvquilt.errors import InputError, nearest
from kvquilt.gate import DoctorReport
from kvquilt.ledger import Fallback
from kvquilt.repair.presets import AUTO_ORDER, METHODS, Method, find_method

POLICIES = ("auto", "always")
_WAY_OUT = "name a method with policy 'always' to reuse anyway, or improve the writer"


def needs_verdict(asked: str, policy: str | None) -> bool:
    """Whether the gate has a say: for `auto`, and for any reusing method under policy ``auto``.

    Raises:
        InputError: unknown method or policy; the message gives the nearest.
    """
    if asked != "auto":
        find_method(asked)
    if policy is not None and policy not in POLICIES:
        raise InputError("policy", f"unknown policy {policy!r}{nearest(policy, POLICIES)}")
    return asked == "auto" or (policy == "auto" and asked != "full")


def resolve(asked: str, report: DoctorReport | None) -> tuple[Method, Fallback | None]:
    """The method that the verdict allows: the first passing one, else full prefill and the reason why."""
    full = METHODS["full"]
    if report is None:
        detail = f"the gate has not measured this model and writer; run doctor; {_WAY_OUT}"
        return full, Fallback("no_verdict", detail)
    if not report.healthy:
        failed = ", ".join(c.name for c in report.checks if not c.passed)
        return full, Fallback("unhealthy_model", f"endpoint checks failed: {failed}")
    reasons = []
    for name in AUTO_ORDER if asked == "auto" else (asked,):
        verdict = report.verdict(name)
        if verdict is not None and verdict.passed:
            return METHODS[name], None
        reasons.append(f"{name}: {verdict.reason if verdict is not None else 'not measured'}")
    return full, Fallback("gate_refused", f"{'; '.join(reasons)}; {_WAY_OUT}")
