"""What a selector may look at: the placed prompt, its stored segments, and the model to probe with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import SOFT
from kvquilt.model.rows import RowPlan, Watcher
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement
from kvquilt.segment import CompiledSegment


@dataclass(eq=False, slots=True)
class Scene:
    """One prompt about to be read.

    Attributes:
        spendable: document runs whose rows may be computed again, ascending: all but the exact ones.
        inline: ascending slot ranges that are computed whatever is chosen: inline text, and the prompt's last rows.
        segments: stored segments by run; empty for selectors that choose before anything is fetched.
        cache: the segments placed in slots, inline slots unwritten; None likewise.
        helper: a second, small model, if the engine has one.
        counter: probes run through it, so that they are charged.
        besides: token-layers charged beyond what `counter` saw, for work of another model.
    """

    model: LanguageModel
    placement: Placement
    spendable: Sequence[int]
    inline: Sequence[range]
    segments: Mapping[int, CompiledSegment] = field(default_factory=dict)
    cache: SlotCache | None = None
    helper: LanguageModel | None = None
    counter: RowCounter = field(default_factory=RowCounter)
    besides: int = 0

    @property
    def placed(self) -> SlotCache:
        """The cache, where the segments have been placed."""
        if self.cache is None:
            raise ValueError("this scene has no placed segments")
        return self.cache

    @property
    def layers(self) -> int:
        return self.model.capability.layers

    @property
    def spans(self) -> list[range]:
        """Slots of the spendable runs, ascending."""
        return [self.placement.span(i) for i in self.spendable]

    @property
    def tokens(self) -> int:
        """Reusable tokens that are not exact: what a budget is a share of."""
        return sum(len(span) for span in self.spans)

    @property
    def slots(self) -> torch.Tensor:
        """``[tokens]`` int64, the slots of all spendable rows, ascending."""
        return joined(self.spans)

    @property
    def inline_slots(self) -> torch.Tensor:
        """``[m]`` int64, ascending: rows that are computed in any case."""
        return joined(self.inline)

    @property
    def question(self) -> torch.Tensor:
        """``[q]`` int64 slots of the rows that ask: inline rows behind the last document and its links, else last."""
        rows, runs = self.inline_slots, self.placement.runs
        told = [i for i, run in enumerate(runs) if run.document is not None or run.ids[0] >= SOFT]
        behind = rows[rows >= self.placement.extent(told[-1]).stop] if told else rows
        return behind if len(behind) else joined(self.inline[-1:])

    def ranked(self, scores: torch.Tensor) -> torch.Tensor:
        """Spendable slots by falling score ``[tokens]``; of equals the earlier one first."""
        return self.slots[scores.argsort(descending=True, stable=True)]

    def probe(
        self, slots: torch.Tensor, watcher: Watcher, until: int, queries: bool, visible: torch.Tensor | None = None
    ) -> None:
        """Run the rows `slots` over the placed segments up to layer `until`, for what `watcher` sees; charged.

        Many rows run a portion at a time, which bounds memory, and the watcher sees every portion: earlier rows never
        see later ones, so the numbers are the same. With `queries` all run at once.

        Args:
            slots: ``[R]`` int64 ascending.
            queries: go on to the queries of the last layer, not only to its keys.
            visible: see `RowPlan`.
        """
        cache, ids = self.placed, torch.tensor(self.placement.ids)
        for part in (slots,) if queries else slots.split(self.model.at_once()):
            plan = RowPlan(
                part,
                self.placement.tokens,
                view=cache.view,
                visible=visible,
                until=until,
                queries=queries,
                watcher=watcher,
            )
            self.model.forward(ids[part][None], plan, cache, 0, self.counter)

    @property
    def charged(self) -> int:
        """Token-layers so far, inline rows included."""
        return self.counter.charge(self.model.projection_share) + self.besides

    def probe_charge(self, rows: int, until: int) -> int:
        """Token-layers that `probe` of so many rows charges."""
        counter = RowCounter(token_layers=rows * (until + 1), unfinished=rows)
        return counter.charge(self.model.projection_share)


def joined(spans: Sequence[range]) -> torch.Tensor:
    """``[n]`` int64: the numbers of all ranges, in their order."""
    if not spans:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(s.start, s.stop) for s in spans])
