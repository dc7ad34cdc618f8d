"""What a writer notes beside keys and values, for methods that choose rows by what was seen offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import Watcher
from kvquilt.model.slots import SlotCache


class Extra(Protocol):
    """One kind of side data; a frozen dataclass in a file of its own whose fields are its settings."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the side data that every segment gets."""
        ...

    @property
    def digest(self) -> str:
        """Content identity; another setting is another writer."""
        ...

    def observe(self, behind: tuple[int, ...], ids: tuple[int, ...]) -> Observation:
        """Be ready for the compile pass of the segment `ids` that is encoded behind `behind`."""
        ...


class Observation(Watcher):
    """Sees the compile pass of one segment, whose rows are all of the plan's, and says what is to be noted.

    Attributes:
        room: slots that `side` needs behind the segment.
    """

    room: int = 0

    def side(self, model: LanguageModel, cache: SlotCache, counter: RowCounter | None) -> Mapping[str, torch.Tensor]:
        """The side data, on the CPU; called once, after the pass.

        Args:
            cache: batch of one, filled up to the segment's last token. What stands behind may be overwritten.
        """
        raise NotImplementedError
