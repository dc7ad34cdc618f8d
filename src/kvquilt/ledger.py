"""The account that every answer carries: what was reused, computed, read, and how long it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from io import StringIO
from textwrap import TextWrapper
from typing import Any

_log = logging.getLogger("kvquilt")


class Provenance(StrEnum):
    """Where a prompt token's keys and values come from."""

    EXACT = "exact"
    REUSED = "reused"
    RECOMPUTED = "recomputed"
    CORRECTED = "corrected"
    ABSENT = "absent"  # stored, but dropped from attention
    INLINE = "inline"


class FallbackReason(StrEnum):
    """Why something cheaper did not happen."""

    NO_VERDICT = "no_verdict"  # the gate has not measured this model and writer
    UNHEALTHY_MODEL = "unhealthy_model"  # an endpoint check failed
    GATE_REFUSED = "gate_refused"
    LOAD_FAILED = "load_failed"  # stored, but unusable; compiled anew
    UNAFFORDABLE = "unaffordable"  # what `auto` would run cannot choose its rows within its budget on this prompt
    NOTHING_REUSED = "nothing_reused"
    NOT_PREPARED = "not_prepared"  # a document was encoded otherwise than its recipe would have at compile time
    VERDICT_NOT_STORED = "verdict_not_stored"


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something cheaper was expected and did not happen.

    Attributes:
        reason: a `FallbackReason` or its value, which equals it; kept as the former.
        detail: a sentence; ids and numbers, never text of a document.
    """

    reason: str
    detail: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", FallbackReason(self.reason))


@dataclass(frozen=True, slots=True)
class DocumentUse:
    """What became of one document in this prompt.

    Attributes:
        start: logical position of its first token.
        provenance: of most of its tokens.
        recomputed: how many of its tokens were computed in this prompt, in all layers or the method's own.
        source: tier it was read from (``memory``, ``disk``), ``compiled`` in this request, or ``-`` if not needed.
        why: one sentence.
    """

    id: str
    tokens: int
    start: int
    provenance: Provenance
    source: str
    why: str
    recomputed: int = 0


@dataclass(frozen=True, slots=True)
class RunUse:
    """One run of a prompt.

    Attributes:
        document: its id; None for text beside documents.
        kept: where its tokens are from, but for `recomputed` of them.
    """

    document: str | None
    tokens: int
    kept: Provenance
    recomputed: int = 0


@dataclass(frozen=True, slots=True)
class Spending:
    """What a request spent beyond pure reuse, in token-layers: one row through one layer.

    Attributes:
        tokens: reusable document tokens that were not exact; with `layers` the base of every share.
        allowed: the budget; None for none.
        rows: document tokens chosen to be computed again.
        probe: what choosing cost, counted by hooks; a helper model's work by its weights.
        repair: document rows through layers in the repair pass, counted by hooks.
        first, last: the layers ``first <= layer < last`` that chosen rows pass; `last` None for all. Before `first`
            what their probe computed, or what is stored, holds; from `last` on what is stored.
    """

    tokens: int
    layers: int
    allowed: int | None
    rows: int
    probe: int
    repair: int
    first: int = 0
    last: int | None = None

    @property
    def charged(self) -> int:
        """Token-layers in all."""
        return self.probe + self.repair

    @property
    def band(self) -> str:
        """Which layers the rows pass, in words, if not all."""
        if not self.first and self.last is None:
            return ""
        return f" in layers {self.first} to {(self.layers if self.last is None else self.last) - 1}"

    @property
    def nominal_share(self) -> float:
        """Rows over reusable tokens: the ratio that papers name."""
        return self.rows / max(1, self.tokens)

    @property
    def charged_share(self) -> float:
        """Token-layers, probe included, over all that reuse saves."""
        return self.charged / max(1, self.tokens * self.layers)


@dataclass(slots=True)
class Ledger:
    """Account of one answer.

    Attributes:
        method: the method that ran, after fallbacks; `asked` is the one that was asked for.
        tokens: prompt tokens by provenance; they sum to the prompt.
        forward_tokens: rows that passed the first layer by stage (``compile``, ``probe``, ``read``, ``decode``),
            counted by hooks. A row that resumes behind its probe is counted with the probe.
        token_layers: the same rows times the layers they passed.
        bytes_read: bytes of keys and values by tier.
        seconds: by stage. ``first_token``: the stages up to the first token, ``prompt`` (tokenising, ranking, placing)
            included; what passes between the call of `stream` and its first iteration is not. ``total``: ``prompt``
            and all from the first iteration to the end of the stream, the caller's own time between two pieces
            included.
        flops: estimated floating-point operations of ``read`` (and of ``compile``, if any); `flops_full` those of a
            full prefill of the same prompt.
        documents: in prompt order. Ids only, never text.
        runs: the whole prompt in its order, for who draws it; empty after a follow-up. Not in `as_dict`.
        writer: of the documents where it was trained: kind, beginning of its digest, and its name if it has one.
        soft_rows: what that writer put around documents; they take slots and positions and are no prompt tokens.
    """

    method: str = ""
    asked: str = ""
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Provenance, 0))
    forward_tokens: dict[str, int] = field(default_factory=lambda: {"compile": 0, "probe": 0, "read": 0, "decode": 0})
    token_layers: int = 0
    bytes_read: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    flops: float = 0.0
    flops_full: float = 0.0
    fallbacks: list[Fallback] = field(default_factory=list)
    documents: list[DocumentUse] = field(default_factory=list)
    runs: list[RunUse] = field(default_factory=list, compare=False)
    spending: Spending | None = None  # None where nothing could be spent on: full prefill, follow-ups
    gate: str = ""  # the measurement that allowed the method, if the gate was asked
    model: str = ""
    threads: int = 0
    writer: str = ""
    soft_rows: int = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the block's duration to ``seconds[name]``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def fall_back(self, reason: str, detail: str) -> None:
        """Note a `FallbackReason` and log it as a warning: ids and numbers only."""
        self.fallbacks.append(Fallback(reason, detail))
        # marked, so that who shows the ledger can leave it out of what is shown of the log
        _log.warning("%s: %s", reason, detail, extra={"in_ledger": True})

    @property
    def reading_seconds(self) -> float:
        """From the placed prompt to its logits; what was compiled on the way is left out."""
        return sum(self.seconds.get(stage, 0.0) for stage in ("choose", "lookup", "place", "probe", "read"))

    @property
    def reused_share(self) -> float:
        """Share of prompt tokens whose keys and values came from the store or from this request's compiling."""
        kept = self.tokens[Provenance.EXACT] + self.tokens[Provenance.REUSED] + self.tokens[Provenance.CORRECTED]
        return kept / max(1, sum(self.tokens.values()))

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        told = {**asdict(self), "tokens": {str(k): v for k, v in self.tokens.items()}}
        del told["runs"]  # what is kept of answers has `documents`
        return told

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Ledger:
        documents = [DocumentUse(**{**d, "provenance": Provenance(d["provenance"])}) for d in data["documents"]]
        made: dict[str, Any] = {"documents": documents, "fallbacks": [Fallback(**f) for f in data["fallbacks"]]}
        if data.get("spending") is not None:
            made["spending"] = Spending(**data["spending"])
        return cls(**{**data, **made})

    def table(self, width: int = 110) -> str:
        """The account as text: one line per document, then tokens, time and fallbacks."""
        from rich.console import Console
        from rich.table import Table

        # no markup: an id may hold brackets
        out = Console(file=StringIO(), width=width, highlight=False, markup=False)
        title = f"{self.model}: {self.method}" + (f" (asked: {self.asked})" if self._changed else "")
        table = Table(title=title)
        for column in ("document", "tokens", "at", "provenance", "from", "why"):
            table.add_column(column, justify="right" if column in ("tokens", "at") else "left", overflow="fold")
        for d in self.documents:
            table.add_row(d.id, str(d.tokens), str(d.start), d.provenance, d.source, d.why)
        out.print(table if self.documents else title)
        counts = "  ".join(f"{name} {count}" for name, count in self.tokens.items() if count)
        forward = "  ".join(f"{name} {count}" for name, count in self.forward_tokens.items())

        # wrapped at whole words, under themselves: neither figures nor ids are torn
        lines = TextWrapper(width, subsequent_indent=" " * 17, break_long_words=False, break_on_hyphens=False)

        def say(label: str, text: str) -> None:
            out.print(lines.fill(f"{label:<17}{text}"), soft_wrap=True)

        soft = f"  +{self.soft_rows} soft rows" if self.soft_rows else ""
        say("prompt tokens", f"{counts}   ({self.reused_share:.0%} reused){soft}")
        say("forward tokens", forward)
        say("seconds", "  ".join(f"{k} {v:.3f}" for k, v in self.seconds.items()))
        if self.bytes_read:
            say("bytes read", "  ".join(f"{k} {v / 1e6:.1f} MB" for k, v in self.bytes_read.items()))
        if self.writer:
            say("writer", self.writer)
        if (spent := self.spending) is not None and (spent.charged or spent.allowed is not None):
            limit = "" if spent.allowed is None else f" of {spent.allowed} allowed"
            say(
                "repair",
                f"{spent.rows} rows ({spent.nominal_share:.1%}); charged {spent.charged} token-layers{limit} "
                f"({spent.charged_share:.1%}): probe {spent.probe}, rows {spent.repair}{spent.band}",
            )
        if self.flops_full:
            say("estimated work", f"{self.flops / self.flops_full:.1%} of a full prefill")
        if self.gate:
            say("gate", self.gate)
        for fallback in self.fallbacks:
            say("fallback", f"{fallback.reason}: {fallback.detail}")
        return str(out.file.getvalue())  # type: ignore[attr-defined]  # the StringIO from above

    @property
    def _changed(self) -> bool:
        return self.asked not in ("", self.method)
