"""Writers that were trained: KV Packet (arXiv 2604.13226), SemPIC (arXiv 2607.28069), and both together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvquilt.errors import WriterMismatchError
from kvquilt.model.language_model import LanguageModel, RowCounter
from kvquilt.model.parts import Parts, soft_ids
from kvquilt.segment import CompiledSegment
from kvquilt.writers.batches import compile_batches
from kvquilt.writers.prefix_cache import PrefixCache

TRAINED = ("kv-packet", "sempic", "joint")  # kinds, and the names of their methods


@dataclass(frozen=True, slots=True)
class Trained:
    """Each document between a trained header and trailer, by the model with a trained adapter on; the reader is plain.

    Either may be missing: without the adapter it is KV Packet, without soft tokens SemPIC. Nothing it compiles is
    exact.

    Attributes:
        kind: what `kvquilt` calls it: ``kv-packet``, ``sempic``, ``joint``.
        base: fingerprint digest of the one model it was trained for.
        parts: the adapter, and the header's soft rows followed by the trailer's.
        prefix: ids that documents are encoded behind; the plain model reads them.
        digest: content identity, over all of the above.
    """

    kind: str
    base: str
    parts: Parts = field(repr=False, compare=False)
    header: int
    trailer: int
    prefix: tuple[int, ...]
    digest: str

    @property
    def encoded_behind(self) -> None:
        return None

    @property
    def side(self) -> frozenset[str]:
        return frozenset()

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return soft_ids(self.header), soft_ids(self.trailer, self.header)

    def compile(
        self, model: LanguageModel, segments: Sequence[tuple[int, ...]], counter: RowCounter | None = None
    ) -> Iterator[tuple[int, CompiledSegment]]:
        """As `Writer.compile`.

        Raises:
            WriterMismatchError: `model` is not the one it was trained for.
        """
        self.check(model)
        header, trailer = self.around
        packets = [header + ids + trailer for ids in segments]
        with PrefixCache(model, counter) as prefix:
            yield from compile_batches(prefix, self.prefix, packets, self.parts)

    def check(self, model: LanguageModel) -> None:
        """Raise `WriterMismatchError` unless `model` is the one it was trained for, in the same dtype."""
        if model.fingerprint.digest != self.base:
            raise WriterMismatchError(
                f"this {self.kind} writer was trained for another model than {model.name} in {model.dtype}: weights, "
                f"tokenizer, rotary table and dtype must all be the same"
            )
