"""The processes that train together: each takes its share of a step's exercises, all take the same step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from kvquilt.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """One process alone unless `found` says otherwise.

    Attributes:
        add: sums a tensor over all processes, in place of every one's.
        wait: returns once all processes are there.
        device: of this process, if they were given one each.
    """

    rank: int = 0
    size: int = 1
    add: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda tensor: tensor, repr=False)
    wait: Callable[[], None] = field(default=lambda: None, repr=False)
    device: torch.device | None = None

    @classmethod
    def found(cls) -> World:
        """The processes of ``accelerate launch`` or ``torchrun``; one where neither started this."""
        size = os.environ.get("WORLD_SIZE", "1")
        if not size.isdecimal():
            raise InputError("WORLD_SIZE", "must be a whole number: of processes, set by what starts them", size)
        if int(size) < 2:
            return cls()
        from accelerate import PartialState
        from accelerate.utils import reduce

        state = PartialState(cpu=not torch.cuda.is_available())

        def add(tensor: torch.Tensor) -> torch.Tensor:
            summed: torch.Tensor = reduce(tensor, reduction="sum")
            return summed

        return cls(state.process_index, state.num_processes, add, state.wait_for_everyone, state.device)

    @property
    def main(self) -> bool:
        """This process writes files and reports."""
        return self.rank == 0

    @contextmanager
    def first(self) -> Iterator[None]:
        """The main process goes through the block before the others do."""
        if not self.main:
            self.wait()
        yield
        if self.main:
            self.wait()

    def share(self, of: Sequence[T]) -> list[T]:
        """This process's part: every one's together are all, each once."""
        return list(of[self.rank :: self.size])
