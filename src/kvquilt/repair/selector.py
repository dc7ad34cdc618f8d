"""What every selector promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from kvquilt.model.rows import Watcher
from kvquilt.repair.scene import Scene


class Probe(StrEnum):
    """What a selector has to run or know before it can choose."""

    NONE = "none"
    RETRIEVER = "retriever"
    OFFLINE = "offline"  # statistics stored with the segments
    LAYER_1 = "layer-1"
    QUESTION = "question"
    HELPER = "helper"

    @property
    def is_blind(self) -> bool:
        """Whether it chooses before any segment is fetched, so that what is computed whole need not be."""
        return self in (Probe.NONE, Probe.RETRIEVER)


class Granularity(StrEnum):
    """The smallest thing a selector chooses."""

    TOKEN = "token"
    RUN = "run"
    BLOCK = "block"
    DOCUMENT = "document"


Narrow = Callable[[dict[int, int]], Watcher]


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """Rows that a selector proposes, best first; the budget keeps the longest head that fits.

    Attributes:
        ranking: ``[K]`` int64 slots of spendable rows, each at most once.
        first, last: the layers ``first <= layer < last`` that compute them; `last` None for all.
        entering: slots ``[E]`` (ascending) and hidden states ``[E, width]`` with which they enter layer `first`; rows
            among them skip the layers before, where others start at layer 0.
        decline: how much the number of rows falls with depth: 0.5 from 1.5 to 0.5 times its mean, 0 not at all.
        narrow: makes the watcher that picks, while the pass goes, which rows a later layer keeps; it is given the
            number of rows for each layer. None: the head of the ranking.
        drop_rest: spendable rows that are not chosen are not attended to at all.
    """

    ranking: torch.Tensor
    first: int = 0
    last: int | None = None
    entering: tuple[torch.Tensor, torch.Tensor] | None = None
    decline: float = 0.0
    narrow: Narrow | None = None
    drop_rest: bool = False

    def __post_init__(self) -> None:
        if self.drop_rest and (self.entering is not None or self.narrow is not None or self.decline):
            raise ValueError("slots move up where rows are dropped: such rows pass all their layers from the start")

    def resuming(self, slots: torch.Tensor) -> int:
        """How many of `slots` enter layer `first` with what a probe left, and pass no layer before."""
        return 0 if self.entering is None else int(torch.isin(slots, self.entering[0]).sum())


class Selector(Protocol):
    """Chooses which document rows are computed again; inline rows always are.

    A selector is a frozen dataclass in a file of its own whose fields are its settings. It looks at the final
    positions. It may probe with `Scene.probe`, which charges the budget.
    """

    @property
    def probe(self) -> Probe: ...

    @property
    def granularity(self) -> Granularity: ...

    def least(self, scene: Scene) -> int:
        """Token-layers that its probe will charge, known without running it; 0 for selectors that run nothing."""
        ...

    def choose(self, scene: Scene) -> Choice:
        """Rank the spendable rows of `scene`. Without any, an empty ranking."""
        ...
