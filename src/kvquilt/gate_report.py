"""What the gate found: verdicts on methods and the report that holds them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvquilt.endpoints import Check

LEAST_PROMPTS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """Fidelity of one method to full prefill.

    Attributes:
        method: as it was written, options included.
        mean_kl, p95_kl: nats per answer token, KL(full || method).
        top1: share of answer tokens whose most likely token is the same.
        prompts, tokens: how much this was measured on.
        reused: document tokens that were reused without being exact; without any, nothing was measured.
        passed, reason: under the limits of the report, see `shortfall`.
        charged: mean share of what reuse saves that was spent again, in token-layers.
        helper: fingerprint of the helper model that the method asked, or "".
        trained: name and digest of the trained writer of its documents (`Reader.identity`), or "".
    """

    method: str
    passed: bool
    mean_kl: float
    p95_kl: float
    top1: float
    prompts: int
    tokens: int
    reused: int
    reason: str
    charged: float
    helper: str = ""
    trained: str = ""

    @property
    def summary(self) -> str:
        """The figures in one line."""
        figures = f"mean KL {self.mean_kl:.3f}, top-1 {self.top1:.2f} at {self.charged:.1%} charged"
        return f"{figures} on {self.prompts} sample prompts"

    def shortfall(self, max_kl: float, min_top1: float) -> str:
        """Why the method does not pass under these limits, or ""."""
        if not self.prompts:
            return self.reason
        if self.prompts < LEAST_PROMPTS:
            return f"measured on {self.prompts} prompts, {LEAST_PROMPTS} are needed"
        if not self.reused:
            return "no token was reused in the sample prompts"
        faults = []
        if not self.mean_kl <= max_kl:
            faults.append(f"mean KL {self.mean_kl:.3f} is above {max_kl:g}")
        if not self.top1 >= min_top1:
            faults.append(f"top-1 agreement {self.top1:.2f} is below {min_top1:g}")
        return "; ".join(faults)

    def worse(self, other: Verdict) -> Verdict:
        """Of each figure the worse, on as little as the lesser was measured on."""
        least = self if self.prompts <= other.prompts else other
        return replace(
            least,
            passed=self.passed and other.passed,
            mean_kl=max(self.mean_kl, other.mean_kl),
            p95_kl=max(self.p95_kl, other.p95_kl),
            top1=min(self.top1, other.top1),
            tokens=min(self.tokens, other.tokens),
            reused=min(self.reused, other.reused),
            reason=self.reason or other.reason,
            charged=max(self.charged, other.charged),
        )

    def judged(self, max_kl: float, min_top1: float) -> Verdict:
        """The same held against these limits."""
        reason = self.shortfall(max_kl, min_top1)
        return replace(self, passed=not reason, reason=reason)


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What `doctor` found; stored under the fingerprint and read back by the engine.

    Attributes:
        checks: of the newest run; `max_kl` and `min_top1` its limits, `seconds` its length.
        verdicts: those of the newest run first, then earlier ones on other methods.
    """

    model: str
    fingerprint: str
    writer: str
    checks: tuple[Check, ...]
    verdicts: tuple[Verdict, ...]
    max_kl: float
    min_top1: float
    seconds: float

    @property
    def healthy(self) -> bool:
        """Every endpoint check passed."""
        return all(c.passed for c in self.checks)

    def verdict(self, method: str) -> Verdict | None:
        return next((v for v in self.verdicts if v.method == method), None)

    def beside(self, earlier: DoctorReport | None) -> DoctorReport:
        """This report with what `earlier` measured of other methods, or writers, held against this one's limits."""
        if earlier is None:
            return self
        mine = {(v.method, v.trained) for v in self.verdicts}
        kept = [v for v in earlier.verdicts if (v.method, v.trained) not in mine and v.prompts]
        return replace(self, verdicts=(*self.verdicts, *(v.judged(self.max_kl, self.min_top1) for v in kept)))

    def both(self, other: DoctorReport) -> DoctorReport:
        """What holds on the documents of both: of the methods that both measured, the worse of their figures."""
        found = [(mine, other.verdict(mine.method)) for mine in self.verdicts]
        kept = tuple(mine.worse(theirs) for mine, theirs in found if theirs is not None)
        return replace(self, checks=(*self.checks, *other.checks), verdicts=kept)

    def asking(self, helper: str, trained: Collection[str] = ()) -> DoctorReport:
        """The same without verdicts on methods that asked another helper model than `helper`, a fingerprint or "", or
        that had other trained writers than `trained`, by `Reader.identity`."""
        kept = (v for v in self.verdicts if v.helper in ("", helper) and v.trained in ("", *trained))
        return replace(self, verdicts=tuple(kept))

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON, which has no NaN: a figure that does not exist is None."""
        plain = asdict(self)
        for row in (*plain["checks"], *plain["verdicts"]):
            row.update({k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)})
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DoctorReport:
        """The report of `as_dict`. Raises TypeError or KeyError for one of another version."""

        def rows(name: str) -> list[dict[str, Any]]:
            return [{k: math.nan if v is None else v for k, v in row.items()} for row in data[name]]

        made = {
            "checks": tuple(Check(**row) for row in rows("checks")),
            "verdicts": tuple(Verdict(**row) for row in rows("verdicts")),
        }
        return cls(**{**data, **made})
