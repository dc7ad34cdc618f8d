"""Documents encoded where they stood, behind other documents, in several variants: Cache-Craft (arXiv 2502.15734)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from kvquilt.errors import InputError
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.placement import Placement
from kvquilt.segment import CompiledSegment
from kvquilt.writers.attention_statistics import AttentionStatistics
from kvquilt.writers.chunk_scores import document_digest
from kvquilt.writers.extra import Extra
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.notebook import Notebook
from kvquilt.writers.recipe import Chosen
from kvquilt.writers.variants import Variant, variants_of, with_variant
from kvquilt.writers.writer import Writer

_KIND = "in-situ"
_WRITE_AFTER = 16  # uses of one document


@dataclass(frozen=True, slots=True)
class InSitu:
    """Each document behind the documents before it, with attention statistics; the best of its variants is used.

    At compile time documents stand in the given order, in groups. At asking time the variant that needs the least
    recompute in the new order is taken; a document without one is encoded in the very place where it stands, and that
    is its first variant.

    Attributes:
        limit: tokens that a prefix and its document may take together.
        group: documents that are encoded one behind the other at compile time.
        variants: kept per document; beyond them, what saved least goes.
        alpha: factor of the share to recompute.
        renew: where even the best variant needs a larger share, the document is encoded anew, as one more variant.
        extras: noted besides the statistics.
    """

    shared: tuple[int, ...]
    limit: int
    group: int = 4
    variants: int = 5
    alpha: float = 1.0
    renew: float = 1.0
    extras: tuple[Extra, ...] = ()

    def __post_init__(self) -> None:
        for field, value in (("group", self.group), ("variants", self.variants)):
            if value < 1:
                raise InputError(field, "at least 1", value)
        if not self.alpha >= 0:
            raise InputError("alpha", "not negative", self.alpha)

    @property
    def name(self) -> str:
        return "in-situ"

    @property
    def side(self) -> frozenset[str]:
        return self._behind(self.shared, ()).side

    def prepare(self, notes: Notebook, segments: Sequence[tuple[int, ...]]) -> Sequence[Writer]:
        known: dict[tuple[int, ...], Isolated] = {}
        prefix, spans = self.shared, list[tuple[int, int]]()
        for ids in dict.fromkeys(segments):
            if variants := self._variants(notes, ids):
                most = max(variants, key=lambda each: each.use.saved)
                known[ids] = self._behind(most.prefix, most.documents)
                continue
            if len(spans) == self.group or len(prefix) + len(ids) > self.limit:
                prefix, spans = self.shared, []
            known[ids] = self._behind(prefix, tuple(spans))
            spans.append((len(prefix), len(prefix) + len(ids)))
            prefix += ids
        return [known[ids] for ids in segments]

    def writers(self, notes: Notebook, placement: Placement, documents: Sequence[int]) -> list[Chosen]:
        standing = placement.documents()
        digests = {i: document_digest(placement.runs[i].ids) for i in standing}
        chosen = []
        for i in documents:
            before = tuple(chain.from_iterable(run.ids for run in placement.runs[:i]))
            earlier = [j for j in standing if j < i]
            best = self._best(notes, placement.runs[i].ids, before, [digests[j] for j in earlier])
            if best is not None:
                chosen.append(Chosen(self._behind(best.prefix, best.documents)))
                continue
            spans = tuple((placement.span(j).start, placement.span(j).stop) for j in earlier)
            chosen.append(Chosen(self._behind(before, spans), "no variant serves; encoded where it stands"))
        return chosen

    def compiled(self, notes: Notebook, writer: Writer, segment: CompiledSegment) -> tuple[Writer, ...]:
        if not isinstance(writer, Isolated):
            raise TypeError("a writer that this recipe did not name")
        statistics = next(each for each in writer.extras if isinstance(each, AttentionStatistics))
        known, new = self._with_uses(notes, segment.ids), Variant.of(writer.prefix, statistics, segment)
        if any(each.name == new.name for each in known):
            self._write(notes, segment.ids, known)  # it had been evicted from the store, not from the note
            return ()
        kept, gone = with_variant(known, new, self.variants)
        self._write(notes, segment.ids, kept)
        return tuple(self._behind(each.prefix, each.documents) for each in gone)

    def _best(
        self, notes: Notebook, ids: tuple[int, ...], before: tuple[int, ...], new: Sequence[str]
    ) -> Variant | None:
        """The variant with the least share to recompute behind the documents `new`; an exact one before others."""
        known = self._variants(notes, ids)
        if not known:
            return None
        share, _, place = min(
            (each.scores.share(self.alpha, new), each.prefix != before, place) for place, each in enumerate(known)
        )
        if share > self.renew:
            return None
        if notes.use(self._subject(ids), known[place].name, 1 - share) >= _WRITE_AFTER:
            self._write(notes, ids, self._with_uses(notes, ids))
        return known[place]

    def _behind(self, prefix: tuple[int, ...], documents: tuple[tuple[int, int], ...]) -> Isolated:
        return Isolated(prefix, (AttentionStatistics(documents), *self.extras))

    def _variants(self, notes: Notebook, ids: tuple[int, ...]) -> list[Variant]:
        subject = self._subject(ids)
        if (note := notes.read(_KIND, subject)) is None:
            return []
        found, sound = variants_of(note, len(ids), notes.vocabulary)
        if not sound:
            notes.lose(_KIND, subject)
        return found

    def _with_uses(self, notes: Notebook, ids: tuple[int, ...]) -> list[Variant]:
        """The variants with all uses so far, to be written."""
        uses = notes.take_uses(self._subject(ids))
        return [each.used(uses.get(each.name)) for each in self._variants(notes, ids)]

    def _write(self, notes: Notebook, ids: tuple[int, ...], variants: list[Variant]) -> None:
        notes.write(_KIND, self._subject(ids), {"variants": [each.as_note() for each in variants]})

    def _subject(self, ids: tuple[int, ...]) -> str:
        extras = "".join(sorted(extra.digest for extra in self.extras))
        return digest_fields(
            "kvquilt 2026-11 recipe in situ v1",
            [("shared", encode_ids(self.shared)), ("extras", extras), ("ids", encode_ids(ids))],
        )
