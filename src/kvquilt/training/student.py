"""The student: documents by a writer under training, everything else by the frozen reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from kvquilt.model.graph import Read, read, write
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts, soft_ids
from kvquilt.model.rope import turned
from kvquilt.model.rows import Pair
from kvquilt.training.lesson import Lesson
from kvquilt.training.teacher import Branches
from kvquilt.writers.prefix_cache import PrefixCache


@dataclass(eq=False, slots=True)
class Student:
    """What serving does, with gradients: compile every packet, move the keys, read the inline rows.

    Attributes:
        header, trailer: soft tokens before and behind every document.
        prefix: ids that documents are encoded behind.
        keep_all: no KV gradient checkpointing.
    """

    model: LanguageModel
    header: int = 0
    trailer: int = 0
    prefix: tuple[int, ...] = ()
    keep_all: bool = False
    _fixed: dict[tuple[int, ...], list[Pair]] = field(default_factory=dict, repr=False)

    def packet(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ids of the rows that a document is compiled to."""
        return soft_ids(self.header) + ids + soft_ids(self.trailer, self.header)

    def read(
        self,
        parts: Parts,
        lessons: Sequence[Lesson],
        branches: Sequence[Branches],
        hidden: bool = False,
        orders: Sequence[Sequence[int]] | None = None,
    ) -> list[Read]:
        """One writer pass for all documents of all lessons, one reader pass per lesson.

        Args:
            orders: in which order each lesson's documents stand; as given by default.
        """
        packets = [[self.packet(ids) for ids in each.documents] for each in lessons]
        flat = [p for each in packets for p in each]
        width = max(map(len, flat))
        padded = torch.zeros(len(flat), width, dtype=torch.int64)
        for row, packet in enumerate(flat):
            padded[row, : len(packet)] = torch.tensor(packet)
        pairs = write(self.model, padded, parts, self.fixed(self.prefix), keep_all=self.keep_all)
        keys, values = (_rows(torch.stack([pair[n] for pair in pairs])) for n in (0, 1))
        out, first = [], 0
        for n, (each, mine) in enumerate(zip(lessons, packets, strict=True)):
            order = range(len(mine)) if orders is None else orders[n]
            taken = [(first + i, len(mine[i])) for i in order]
            first += len(mine)
            slots, filled = self._slots(each.opening, taken, width, keys, values)
            plan = branches[n].plan(filled)
            out.append(read(self.model, branches[n].ids, plan, slots, branches[n].tail, hidden=hidden))
        return out

    def _slots(
        self,
        opening: tuple[int, ...],
        taken: list[tuple[int, int]],
        width: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[list[Pair], int]:
        """Opening and packets in their order, keys moved, by layer; and how many slots that is.

        Args:
            taken: row of the padded batch and length of each packet.
            keys: ``[layers, kv_heads, batch * width, dim]``.
        """
        starts = list(accumulate((length for _, length in taken), initial=len(opening)))
        rows = torch.cat([torch.arange(row * width, row * width + length) for row, length in taken])
        deltas = torch.cat(
            [torch.full((length,), at - len(self.prefix)) for at, (_, length) in zip(starts, taken, strict=False)]
        )
        rows = rows.to(keys.device)
        moved = self._moved(keys.index_select(2, rows), deltas)
        stored = values.index_select(2, rows)
        ahead = self.fixed(opening)
        if ahead:
            moved = torch.cat((torch.stack([k[0] for k, _ in ahead]), moved), 2)
            stored = torch.cat((torch.stack([v[0] for _, v in ahead]), stored), 2)
        pairs = zip(moved[:, None].unbind(0), stored[:, None].unbind(0), strict=True)
        return list(pairs), starts[-1]

    def _moved(self, keys: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
        """Keys ``[layers, kv_heads, rows, dim]``, each row rotated by its delta; in fp32, cast once."""
        tables = self.model.capability.tables
        out: list[torch.Tensor | None] = [None] * len(tables)
        for table in {id(t): t for t in tables}.values():
            layers = [i for i, t in enumerate(tables) if t is table]
            mine = keys if len(layers) == len(tables) else keys[layers]
            if table is not None:
                mine = turned(mine.float(), table.angles(deltas)).to(keys.dtype)
            if len(layers) == len(tables):
                return mine
            for layer, each in zip(layers, mine.unbind(0), strict=True):
                out[layer] = each
        return torch.stack([each for each in out if each is not None])

    def fixed(self, ids: tuple[int, ...]) -> list[Pair]:
        """By layer, keys and values ``[1, kv_heads, n, dim]`` of ids that the plain model reads first."""
        if ids and ids not in self._fixed:
            with PrefixCache(self.model) as prefix:
                cache = prefix.reach(ids)
                both = (cache.slot_keys[:, :, :, : len(ids)].clone(), cache.slot_values[:, :, :, : len(ids)].clone())
            self._fixed[ids] = list(zip(*both, strict=True))
        return self._fixed.get(ids, [])


def _rows(states: torch.Tensor) -> torch.Tensor:
    """``[layers, batch, kv_heads, tokens, dim]`` to ``[layers, kv_heads, batch * tokens, dim]``."""
    return states.transpose(1, 2).flatten(2, 3)
