"""Each document encoded behind those most like it: the offline step of FusionRAG (arXiv 2601.12904)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvquilt.errors import InputError
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.placement import Placement
from kvquilt.segment import CompiledSegment
from kvquilt.writers.extra import Extra
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.notebook import Notebook, pack, unpack
from kvquilt.writers.recipe import Chosen
from kvquilt.writers.similarity import most_similar
from kvquilt.writers.writer import Writer

_KIND = "neighbours"
_ALONE = "no neighbours were prepared (compile for this method first); encoded behind the shared prefix alone"


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Behind the shared prefix and the most similar documents of the compile call (BM25 over token ids).

    Documents that share no token are no neighbours. Neighbours stand in the order of the call, so that documents with
    the same ones share their encoding. What was chosen is noted per document and kept when more documents come.

    Attributes:
        limit: tokens that prefix and document may take together; neighbours that do not fit are passed over.
        count: neighbours of each document.
    """

    shared: tuple[int, ...]
    limit: int
    count: int = 2
    extras: tuple[Extra, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError("count", "at least 1", self.count)

    @property
    def name(self) -> str:
        return "neighbours"

    @property
    def side(self) -> frozenset[str]:
        return self._behind(self.shared).side

    def prepare(self, notes: Notebook, segments: Sequence[tuple[int, ...]]) -> Sequence[Writer]:
        distinct = list(dict.fromkeys(segments))
        known = {ids: self._noted(notes, ids) for ids in distinct}
        new = [n for n, ids in enumerate(distinct) if known[ids] is None]
        for n, similar in zip(new, most_similar(distinct, new), strict=True):
            prefix = self.shared + self._joined(distinct, similar, self.limit - len(self.shared) - len(distinct[n]))
            notes.write(_KIND, self._subject(distinct[n]), {"prefix": pack(prefix)})
            known[distinct[n]] = prefix
        return [self._behind(known[ids]) for ids in segments]

    def writers(self, notes: Notebook, placement: Placement, documents: Sequence[int]) -> list[Chosen]:
        chosen = []
        for i in documents:
            prefix = self._noted(notes, placement.runs[i].ids)
            reason = "" if prefix is not None else _ALONE
            chosen.append(Chosen(self._behind(prefix), reason))
        return chosen

    def compiled(self, notes: Notebook, writer: Writer, segment: CompiledSegment) -> tuple[Writer, ...]:
        return ()

    def _joined(self, segments: list[tuple[int, ...]], similar: list[int], room: int) -> tuple[int, ...]:
        """The first `count` of `similar` that fit into `room` tokens, in the order of `segments`."""
        chosen: list[int] = []
        for n in similar:
            if len(chosen) < self.count and len(segments[n]) <= room:
                chosen.append(n)
                room -= len(segments[n])
        return tuple(i for n in sorted(chosen) for i in segments[n])

    def _behind(self, prefix: tuple[int, ...] | None) -> Isolated:
        return Isolated(self.shared if prefix is None else prefix, self.extras)

    def _noted(self, notes: Notebook, ids: tuple[int, ...]) -> tuple[int, ...] | None:
        subject = self._subject(ids)
        if (note := notes.read(_KIND, subject)) is None:
            return None
        prefix = unpack(note.get("prefix"), notes.vocabulary)
        if prefix is not None and len(prefix) + len(ids) <= max(self.limit, len(self.shared) + len(ids)):
            return prefix
        notes.lose(_KIND, subject)
        return None

    def _subject(self, ids: tuple[int, ...]) -> str:
        return digest_fields(
            "kvquilt 2026-11 recipe neighbours v1",
            [("shared", encode_ids(self.shared)), ("count", str(self.count)), ("ids", encode_ids(ids))],
        )
