"""Which method runs: what was asked for, held against the gate's verdict."""

from __future__ import annotations

from collections.abc import Sequence

from kvquilt.errors import InputError, nearest
from kvquilt.gate_report import DoctorReport
from kvquilt.ledger import Fallback
from kvquilt.repair.presets import AUTO_ORDER, METHODS, Method, find_method
from kvquilt.repair.written import has_budget

POLICIES = ("auto", "always")
_WAY_OUT = "to reuse without a passing measurement, name a method, such as retrieved-document"


def needs_verdict(asked: str, policy: str | None) -> bool:
    """Whether the gate has a say: for `auto`, and for any reusing method under policy ``auto``.

    Raises:
        InputError: unknown method or policy; the message gives the nearest.
    """
    if asked != "auto":
        find_method(asked)
    if policy is not None and policy not in POLICIES:
        raise InputError("policy", f"unknown policy {policy!r}{nearest(policy, POLICIES)}")
    return asked == "auto" or (policy == "auto" and find_method(asked).reuses)


def written_method(method: str, budget: object, default: object = None) -> str:
    """The method's name with the budget written into it.

    Args:
        budget: given for this request.
        default: what holds without `budget` for methods that take one and are not written with one.

    Raises:
        InputError: unknown method; a budget that is none, or beside `auto`, whose budget is the measured one, or
            beside full prefill.
    """
    if budget is None:
        if default is None or method == "auto" or not find_method(method).reuses or has_budget(method):
            return method
        return find_method(method).within(default).name
    if method == "auto":
        raise InputError("budget", "auto runs what was measured; name a method to give it a budget", str(budget))
    return find_method(method).within(budget).name


def resolve(
    asked: str,
    report: DoctorReport | None,
    max_kl: float,
    min_top1: float,
    order: Sequence[str] = AUTO_ORDER,
) -> tuple[Method, Fallback | None]:
    """The method that the measurement allows under these limits: the first that passes, else full prefill and why.

    The limits are those in force now, not those of the day of the measurement. A method of a trained writer that does
    not pass is said even where another one does: whoever gave the writer expects it.

    Args:
        order: what `auto` tries, first to last, as methods are written; beyond `AUTO_ORDER`, trained writers' own.
    """
    full = METHODS["full"]
    if report is None:
        detail = (
            f"reuse has not been measured on your documents with this model: compile them or run doctor; {_WAY_OUT}"
        )
        return full, Fallback("no_verdict", detail)
    if not report.healthy:
        failed = ", ".join(c.name for c in report.checks if not c.passed)
        return full, Fallback("unhealthy_model", f"endpoint checks failed: {failed}")
    reasons: dict[str, str] = {}
    for name in order if asked == "auto" else (asked,):
        verdict = report.verdict(name)
        shortfall = "not measured" if verdict is None else verdict.shortfall(max_kl, min_top1)
        if not shortfall:
            told = "; ".join(f"{other}: {why}" for other, why in reasons.items() if other not in AUTO_ORDER)
            return find_method(name), Fallback("gate_refused", f"{told}; {name} runs instead") if told else None
        reasons[name] = shortfall
    way_out = _WAY_OUT if asked == "auto" else f"measure it (doctor --methods '{asked}') or leave policy auto out"
    said = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    return full, Fallback("gate_refused", f"{said}; {way_out}")
