"""What became of a prompt that was read: provenance of every token, bytes by tier, what was spent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvquilt.ledger import DocumentUse, Ledger, Provenance, RunUse
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import SOFT
from kvquilt.placement import Order, Placement
from kvquilt.repair.presets import Method
from kvquilt.store import Held, MissReason


@dataclass(frozen=True, eq=False, slots=True)
class Outcome:
    """One prompt that was read.

    Attributes:
        exact: runs that stand behind the very tokens they were encoded behind, by a writer that alters nothing.
        held: what the store gave, by run.
        computed: ``[R]`` int64 slots that were run, inline ones included.
        dropped: rows that were not chosen are out of attention.
    """

    method: Method
    placement: Placement
    exact: set[int]
    held: Mapping[int, Held]
    computed: torch.Tensor
    dropped: bool

    def enter(self, ledger: Ledger) -> None:
        """Provenance of every run, bytes by tier, one line per document."""
        ran = torch.zeros(self.placement.tokens, dtype=torch.bool)
        ran[self.computed] = True
        positions = self.placement.positions
        ledger.soft_rows += sum(len(run.header) + len(run.trailer) for run in self.placement.runs)
        for i, run in enumerate(self.placement.runs):
            if run.document is None and run.ids[0] >= SOFT:  # links: computed, and no tokens of the prompt
                ledger.soft_rows += len(run.ids)
                continue
            span, found = self.placement.span(i), self.held.get(i)
            again = int(ran[span.start : span.stop].sum())
            if run.document is None and found is None:
                ledger.tokens[Provenance.INLINE] += len(run.ids)
                ledger.runs.append(RunUse(None, len(run.ids), Provenance.INLINE))
                continue
            kept, why = self._kept(i, again)
            source = "-"
            if found is not None and found.segment is not None:
                source = str(found.tier)
                ledger.bytes_read[source] = ledger.bytes_read.get(source, 0) + found.bytes_read
                if source == "compiled":
                    why += f"; was not stored ({found.reason}), compiled now"
                    if found.reason != MissReason.ABSENT and not MissReason(found.reason).unanswered:
                        name = run.document.id if run.document is not None else "the prompt's opening"
                        ledger.fall_back("load_failed", f"{name}: stored, but {found.reason}; compiled anew")
            if again == len(run.ids):
                why = self._chosen(i)
            elif again:
                why = f"{again} of {len(run.ids)} tokens computed again; the others {why}"
            ledger.tokens[kept] += len(run.ids) - again
            ledger.tokens[Provenance.RECOMPUTED] += again
            ledger.runs.append(RunUse(None if run.document is None else run.document.id, len(run.ids), kept, again))
            if run.document is not None:
                provenance = Provenance.RECOMPUTED if 2 * again > len(run.ids) else kept
                at = positions[i] + len(run.header)
                use = DocumentUse(run.document.id, len(run.ids), at, provenance, source, why, again)
                ledger.documents.append(use)

    def _kept(self, run: int, again: int) -> tuple[Provenance, str]:
        """Of rows that were not computed, beside `again` that were, and why."""
        if run in self.exact or self.placement.runs[run].document is None:
            return Provenance.EXACT, "behind the very tokens it was encoded behind"
        if not self.placement.runs[run].placed:
            return Provenance.REUSED, "seen through cross-attention, takes no position"
        if self.dropped:
            return Provenance.ABSENT, "dropped from attention"
        if self.method.correction is not None and self.method.correction.reaches(again):
            return Provenance.CORRECTED, "moved and corrected, not recomputed"
        return Provenance.REUSED, "moved, not recomputed"

    def _chosen(self, run: int) -> str:
        if not self.method.reuses:
            return "full prefill"
        if self.placement.ranking[:1] != (run,):
            return "chosen, recomputed"
        moved = self.method.order is Order.TARGET_LAST
        return "best-ranked: next to the question, recomputed" if moved else "best-ranked, recomputed"


def attention_flops(model: LanguageModel, pairs: int) -> float:
    """Scores and weighted sums of so many query-key pairs, all heads."""
    c = model.capability
    return 2.0 * c.heads * (c.key_dim + c.value_dim) * pairs


def counted_flops(model: LanguageModel, counter: RowCounter, besides: int = 0) -> float:
    """Estimated floating-point operations of counted rows: weights, attention, one output row.

    Args:
        besides: token-layers' worth of another model's work.
    """
    per_layer = model.layer_weights / model.capability.layers
    linear = 2.0 * per_layer * (counter.charge(model.projection_share) + besides)
    return linear + attention_flops(model, counter.pairs) + 2.0 * model.head_weights + counter.besides


def full_flops(model: LanguageModel, tokens: int) -> float:
    """The same for a full prefill of `tokens`."""
    seen = torch.arange(1, tokens + 1)
    pairs = sum(int((seen if w is None else seen.clamp(max=w)).sum()) for w in model.capability.windows)
    return 2.0 * model.layer_weights * tokens + attention_flops(model, pairs) + 2.0 * model.head_weights
