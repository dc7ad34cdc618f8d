"""The note of one document that was encoded in several contexts: which, how well they did, and which one goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvquilt.errors import InputError
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.segment import CompiledSegment
from kvquilt.writers.attention_statistics import AttentionStatistics
from kvquilt.writers.chunk_scores import ChunkScores
from kvquilt.writers.notebook import Use, pack, unpack


@dataclass(frozen=True, slots=True)
class Variant:
    """One context in which a document was encoded.

    Attributes:
        prefix: the ids it was encoded behind; `documents` are the spans of the earlier documents in it.
        use: since it was compiled; `saved` sums the shares of rows that needed no recompute.
    """

    prefix: tuple[int, ...]
    documents: tuple[tuple[int, int], ...]
    scores: ChunkScores
    use: Use = field(default_factory=Use)

    @property
    def name(self) -> str:
        """What tells it from the document's other variants."""
        edges = encode_ids([edge for span in self.documents for edge in span])
        return digest_fields("kvquilt 2026-11 variant v1", [("prefix", encode_ids(self.prefix)), ("documents", edges)])

    @classmethod
    def of(cls, prefix: tuple[int, ...], statistics: AttentionStatistics, segment: CompiledSegment) -> Variant:
        return cls(prefix, statistics.documents, ChunkScores.of(segment.side, segment.tokens))

    def used(self, use: Use | None) -> Variant:
        """The same with further uses."""
        if use is None:
            return self
        return replace(self, use=Use(self.use.hits + use.hits, self.use.saved + use.saved))

    def as_note(self) -> dict[str, Any]:
        return {
            "prefix": pack(self.prefix),
            "documents": [list(span) for span in self.documents],
            "earlier": list(self.scores.earlier),
            "inter": list(self.scores.inter),
            "intra": self.scores.intra,
            "hits": self.use.hits,
            "saved": self.use.saved,
        }


def variants_of(note: Mapping[str, Any], tokens: int, vocabulary: int) -> tuple[list[Variant], bool]:
    """The variants of a document of so many tokens, oldest first, and whether all that is noted is sound: what is not
    is left out."""
    listed = note.get("variants")
    if not isinstance(listed, list):
        return [], False
    found = [_variant(each, tokens, vocabulary) for each in listed]
    return [each for each in found if each is not None], None not in found


def with_variant(known: list[Variant], new: Variant, most: int) -> tuple[list[Variant], list[Variant]]:
    """`known` and `new`, and what had to go: while more than `most`, whatever saved least so far, saving x frequency.

    The new one stays, since it had no time to save anything; of equals the older goes.
    """
    kept, gone = list(known), []
    while len(kept) >= most:
        least = min(kept, key=lambda each: each.use.saved)
        kept.remove(least)
        gone.append(least)
    return [*kept, new], gone


def _variant(fields: Any, tokens: int, vocabulary: int) -> Variant | None:
    try:
        prefix = unpack(fields["prefix"], vocabulary)
        spans = tuple((int(a), int(b)) for a, b in fields["documents"])
        documents = AttentionStatistics(spans).documents
        earlier = tuple(str(name) for name in fields["earlier"])
        inter = tuple(float(given) for given in fields["inter"])
        intra, use = float(fields["intra"]), Use(int(fields["hits"]), float(fields["saved"]))
    except (KeyError, TypeError, ValueError, OverflowError, InputError):
        return None
    numbers = (*inter, intra, use.saved, use.hits)
    sound = (
        prefix is not None
        and (not documents or documents[-1][1] <= len(prefix))
        and len(earlier) == len(inter) == len(documents)
        and all(math.isfinite(n) and n >= 0 for n in numbers)
        and intra > 0
    )
    if prefix is None or not sound:
        return None
    lengths = tuple(last - first for first, last in documents)
    return Variant(prefix, documents, ChunkScores(earlier, inter, lengths, intra, tokens), use)
