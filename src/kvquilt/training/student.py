"""The student: documents by a writer under training, everything else by the frozen reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import torch

from kvquilt.model.graph import Read, read, write
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import PLAIN, Parts, soft_ids
from kvquilt.model.rope import turned
from kvquilt.model.rows import Pair
from kvquilt.training.lesson import Lesson
from kvquilt.training.teacher import Branches
from kvquilt.training.trainable import Orders
from kvquilt.writers.prefix_cache import PrefixCache


@dataclass(eq=False, slots=True)
class Student:
    """Compiles every packet, moves the keys, reads the inline rows. A `Pupil`.

    Attributes:
        header, trailer: soft tokens before and behind every document.
        prefix: ids that documents are encoded behind.
        keep_all: no KV gradient checkpointing.
        tuned: the reader has the parts on, too, and is another model by them.
    """

    passes: ClassVar[int] = 1
    model: LanguageModel
    header: int = 0
    trailer: int = 0
    prefix: tuple[int, ...] = ()
    keep_all: bool = False
    tuned: bool = False
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
        orders: Orders | None = None,
    ) -> list[Read]:
        """One writer pass for all documents of all lessons, one reader pass per lesson."""
        keys, values, places = self._written(parts, lessons)
        return [
            self._one(parts, each, branches[n], keys, values, places[n], hidden, None if orders is None else orders[n])
            for n, each in enumerate(lessons)
        ]

    def learn(
        self,
        parts: Parts,
        lessons: Sequence[Lesson],
        branches: Sequence[Branches],
        loss: Callable[[int, Read], torch.Tensor],
        hidden: bool = False,
        orders: Orders | None = None,
    ) -> None:
        """As `read` and one backward, but one lesson's reader at a time, and the writer once for all of them.

        If `loss` raises, nothing was asked of the writer.
        """
        keys, values, places = self._written(parts, lessons)
        asked = torch.zeros_like(keys), torch.zeros_like(values)
        for n, each in enumerate(lessons):
            own = slice(places[n][0][0], sum(places[n][-1]))  # from its first document to its last
            leaves = [t[:, :, own].detach().requires_grad_() for t in (keys, values)]
            near = [(first - own.start, length) for first, length in places[n]]
            order = None if orders is None else orders[n]
            read = self._one(parts, each, branches[n], leaves[0], leaves[1], near, hidden, order)
            loss(n, read).backward()
            del read
            for whole, leaf in zip(asked, leaves, strict=True):
                if leaf.grad is not None:
                    whole[:, :, own] = leaf.grad
        if keys.requires_grad:  # not so where only what the reader has beside the model is trained
            torch.autograd.backward((keys, values), asked)

    def _written(
        self, parts: Parts, lessons: Sequence[Lesson]
    ) -> tuple[torch.Tensor, torch.Tensor, list[list[tuple[int, int]]]]:
        """All documents' keys and values ``[layers, kv_heads, rows, dim]``; by lesson, first row and length of each."""
        packets = [[self.packet(ids) for ids in each.documents] for each in lessons]
        flat = [packet for each in packets for packet in each]
        pairs = write(self.model, flat, parts, self.fixed(self.prefix, parts), keep_all=self.keep_all)
        firsts = iter(accumulate(map(len, flat), initial=0))
        places = [[(next(firsts), len(packet)) for packet in each] for each in packets]
        return torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs]), places

    def _one(
        self,
        parts: Parts,
        lesson: Lesson,
        branches: Branches,
        keys: torch.Tensor,
        values: torch.Tensor,
        places: Sequence[tuple[int, int]],
        hidden: bool,
        order: Sequence[int] | None,
    ) -> Read:
        taken = list(places) if order is None else [places[i] for i in order]
        slots, filled = self._slots(self.fixed(lesson.opening, parts), taken, keys, values)
        reader = parts if self.tuned else PLAIN
        plan, tail = branches.plan(filled), branches.tail
        return read(self.model, branches.ids, plan, slots, tail, parts=reader, hidden=hidden)

    def _slots(
        self, ahead: list[Pair], taken: list[tuple[int, int]], keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[list[Pair], int]:
        """What stands `ahead`, and packets in their order, keys moved, by layer; and how many slots that is.

        Args:
            taken: first row and length of each packet.
            keys: ``[layers, kv_heads, rows, dim]``.
        """
        starts = list(accumulate((length for _, length in taken), initial=ahead[0][0].shape[2] if ahead else 0))
        rows = torch.cat([torch.arange(first, first + length) for first, length in taken])
        deltas = torch.cat(
            [torch.full((length,), at - len(self.prefix)) for at, (_, length) in zip(starts, taken, strict=False)]
        )
        rows = rows.to(keys.device)
        moved = self._moved(keys.index_select(2, rows), deltas)
        stored = values.index_select(2, rows)
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

    def fixed(self, ids: tuple[int, ...], parts: Parts = PLAIN) -> list[Pair]:
        """By layer, keys and values ``[1, kv_heads, n, dim]`` of ids that the reader reads first."""
        if ids and self.tuned:  # anew each time: these have gradients, and every backward ends its own graph
            return write(self.model, [ids], parts, keep_all=self.keep_all)
        if ids and ids not in self._fixed:
            with PrefixCache(self.model) as prefix:
                self._fixed[ids] = prefix.copied(ids)
        return self._fixed.get(ids, [])
