"""From a placed prompt to its first logits: fetch or compile segments, assemble, repair, account for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from kvquilt.identity import SegmentKey, segment_key
from kvquilt.ledger import DocumentUse, Ledger, Provenance
from kvquilt.model.language_model import LanguageModel, RowCounter
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement
from kvquilt.repair.operator import assemble, repair
from kvquilt.repair.presets import Method
from kvquilt.segment import CompiledSegment
from kvquilt.store import Held, Layout, MissReason, Store
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.writer import Writer

OPENING = Isolated()  # compiles the prompt's opening: behind nothing, it is what full prefill computes


@dataclass(frozen=True, slots=True)
class Reader:
    """What reading needs besides the prompt.

    Attributes:
        preamble: ids that the engine's own prompts begin with; compiled once, such a beginning is an exact prefix.
        writer: compiles documents.
    """

    model: LanguageModel
    store: Store
    writer: Writer
    preamble: tuple[int, ...]

    def layout(self) -> Layout:
        """What a stored segment must look like to be usable by this model."""
        c = self.model.capability
        return Layout(self.model.dtype, c.layers, c.kv_heads, c.key_dim, c.value_dim)

    def key(self, ids: tuple[int, ...], tenant: str | None, writer: Writer | None = None) -> SegmentKey:
        return segment_key(self.model.fingerprint.digest, (writer or self.writer).digest, tenant, ids)

    def compiler(
        self, segments: list[tuple[int, ...]], ledger: Ledger, writers: list[Writer]
    ) -> Callable[[list[int]], Iterator[tuple[int, CompiledSegment]]]:
        """What the store calls for segments it does not have; `writers[i]` compiles `segments[i]`."""

        def compile_missing(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
            counter = RowCounter()
            try:
                for writer in dict.fromkeys(writers[i] for i in missing):
                    mine = [i for i in missing if writers[i] == writer]
                    with ledger.stage("compile"):
                        for j, segment in writer.compile(self.model, [segments[i] for i in mine], counter):
                            yield mine[j], segment
            finally:
                ledger.forward_tokens["compile"] += counter.rows
                ledger.token_layers += counter.token_layers

        return compile_missing

    def read(
        self,
        placement: Placement,
        method: Method,
        tenant: str | None,
        ledger: Ledger,
        room: int,
        logits: int = 1,
    ) -> tuple[torch.Tensor, SlotCache]:
        """Logits ``[logits, vocabulary]`` of the prompt's last rows and the cache behind them.

        Args:
            room: slots to reserve behind the prompt. The caller gives the cache back to the model's pool.
        """
        ids = placement.ids
        behind = self.writer.encoded_behind
        # lengths first: comparing the ids before every document would cost milliseconds in a long prompt
        exact = {
            i
            for i in placement.documents()
            if behind is not None and placement.starts[i] == len(behind) and ids[: len(behind)] == behind
        }
        chosen = method.selector.select(placement)
        # an exact segment's rows would come out the same, so they are never spent on
        chosen = [r for r in chosen if not method.reuses or not any(placement.span(i) == r for i in exact)]
        covered = {i for i in placement.documents() if any(placement.span(i) == r for r in chosen)}
        wanted = [i for i in placement.documents() if i not in covered] if method.reuses else []
        if method.reuses and placement.runs[0].document is None and placement.runs[0].ids == self.preamble:
            wanted.insert(0, 0)
            exact.add(0)
        segments = [placement.runs[i].ids for i in wanted]
        writers: list[Writer] = [self.writer if placement.runs[i].document else OPENING for i in wanted]
        keys = [self.key(s, tenant, w) for s, w in zip(segments, writers, strict=True)]
        with ledger.stage("lookup"):
            fetching = self.store.fetch(
                list(zip(keys, segments, strict=True)),
                self.compiler(segments, ledger, writers),
                layout=self.layout(),
            )
            with fetching as held:
                placed = {i: h.segment for i, h in zip(wanted, held, strict=True) if h.segment is not None}
                with ledger.stage("place"):
                    cache = assemble(self.model, placement, placed, placement.tokens + room)
        ledger.seconds["lookup"] -= ledger.seconds["place"] + ledger.seconds.get("compile", 0.0)
        counter = RowCounter()
        # a prompt may end with a stored document, whose last rows must be run to predict what follows them
        tail = range(max(0, placement.tokens - logits), placement.tokens)
        rows = list(_rows(placement, [*chosen, tail], stored=set(placed)))
        try:
            with ledger.stage("read"):
                out = repair(self.model, cache, ids, rows, logits, counter)
        except BaseException:
            self.model.pool.release(cache)
            raise
        ledger.forward_tokens["read"] += counter.rows
        ledger.token_layers += counter.token_layers
        account = _Account(method, exact, dict(zip(wanted, held, strict=True)), tail)
        account.enter(ledger, placement)
        ledger.flops += flops(self.model, rows) + ledger.forward_tokens["compile"] * 2.0 * self.model.layer_weights
        ledger.flops_full += flops(self.model, [range(placement.tokens)])
        if method.reuses and covered and covered == set(placement.documents()):
            ledger.fall_back("nothing_reused", "every document of this prompt was computed; there was nothing to reuse")
        return out, cache

    def extend(
        self, cache: SlotCache, new: list[int], method: str, ledger: Ledger, room: int
    ) -> tuple[torch.Tensor, SlotCache]:
        """Continue a live cache with the ids `new`: logits ``[1, vocabulary]`` and the cache, larger if need be.

        Args:
            method: what the earlier turns ran: a live cache is as good as the turns it grew from.
        """
        first, total = cache.filled, cache.filled + len(new)
        counter = RowCounter()
        try:
            cache = self.model.pool.grow(cache, total + room)
            with ledger.stage("read"):
                logits = self.model.forward(
                    torch.tensor([new]), RowPlan(torch.arange(first, total), total), cache, 1, counter
                )[0]
        except BaseException:
            self.model.pool.release(cache)
            raise
        ledger.forward_tokens["read"] += counter.rows
        ledger.token_layers += counter.token_layers
        ledger.tokens[Provenance.EXACT if method == "full" else Provenance.REUSED] += first
        ledger.tokens[Provenance.INLINE] += len(new)
        ledger.flops += flops(self.model, [range(first, total)])
        ledger.flops_full += flops(self.model, [range(total)])
        return logits, cache


@dataclass(frozen=True, slots=True)
class _Account:
    """What became of every run of a prompt that was read.

    Attributes:
        exact: runs that stand behind the very tokens they were encoded behind, by a writer that alters nothing.
        held: what the store gave, by run.
        tail: slots that were run whatever they hold, since a prompt's last rows predict what follows.
    """

    method: Method
    exact: set[int]
    held: dict[int, Held]
    tail: range

    def enter(self, ledger: Ledger, placement: Placement) -> None:
        """Provenance of every run, bytes by tier, one line per document."""
        for i, run in enumerate(placement.runs):
            found = self.held.get(i)
            provenance, source, why, again = Provenance.INLINE, "-", "inline text is computed in every request", 0
            if found is not None and found.segment is not None:
                source = str(found.tier)
                ledger.bytes_read[source] = ledger.bytes_read.get(source, 0) + found.bytes_read
                provenance = Provenance.EXACT if i in self.exact else Provenance.REUSED
                why = "behind the very tokens it was encoded behind" if i in self.exact else "moved, not recomputed"
                if source == "compiled":
                    why += f"; was not stored ({found.reason}), compiled now"
                    if found.reason != MissReason.ABSENT:
                        name = run.document.id if run.document is not None else "the prompt's opening"
                        ledger.fall_back("load_failed", f"{name}: stored, but {found.reason}; compiled anew")
                again = max(0, placement.span(i).stop - max(placement.starts[i], self.tail.start))
            elif run.document is not None:
                provenance = Provenance.RECOMPUTED
                why = "best-ranked: next to the question, recomputed" if self.method.reuses else "full prefill"
            ledger.tokens[provenance] += len(run.ids) - again
            ledger.tokens[Provenance.RECOMPUTED] += again
            if run.document is not None:
                use = DocumentUse(run.document.id, len(run.ids), placement.starts[i], provenance, source, why)
                ledger.documents.append(use)


def _rows(placement: Placement, chosen: Iterable[range], stored: set[int]) -> Iterator[range]:
    """Inline rows that are not stored, and the chosen document rows, ascending and merged."""
    inline = [placement.span(i) for i, run in enumerate(placement.runs) if run.document is None and i not in stored]
    first = last = 0
    for r in sorted([*inline, *chosen], key=lambda r: r.start):
        if r.start > last:
            if last > first:
                yield range(first, last)
            first = r.start
        last = max(last, r.stop)
    yield range(first, last)


def flops(model: LanguageModel, rows: Iterable[range]) -> float:
    """Estimated floating-point operations of `rows`: weights, attention over all earlier slots, one output row."""
    c = model.capability
    total = 2.0 * model.head_weights
    for r in rows:
        seen = (r.start + 1 + r.stop) * len(r) / 2
        total += 2.0 * model.layer_weights * len(r) + 2.0 * c.layers * c.heads * (c.key_dim + c.value_dim) * seen
    return total
