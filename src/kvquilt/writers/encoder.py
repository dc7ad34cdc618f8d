"""Documents through a trained encoder of their own, read by cross-attention (COMB, arXiv 2602.01519)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from kvquilt.errors import InputError
from kvquilt.identity import Fingerprint, digest_fields
from kvquilt.model.chunk_encoder import encode
from kvquilt.model.counter import RowCounter
from kvquilt.model.cross_attention import CrossAttention
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts
from kvquilt.placement import Order, Placement
from kvquilt.repair.nothing import Nothing
from kvquilt.segment import CompiledSegment
from kvquilt.writers.batches import batches, padded
from kvquilt.writers.folder import WEIGHTS, save_folder
from kvquilt.writers.manifest import NOTHING, base_of, check_base, check_content, manifest
from kvquilt.writers.tensors import copied, read_tensors
from kvquilt.writers.writer import Writer

if TYPE_CHECKING:
    from kvquilt.repair.presets import Method

ENCODER = "encoder"  # the kind, and the name of its method


@dataclass(frozen=True, slots=True)
class Encoder:
    """Each document alone through a bidirectional encoder; the reader looks at it from gated cross layers.

    Its segments hold one pair of keys and values per cross layer, keys without rotation. They take no slots and no
    positions, and have no order. Nothing of them can be computed again.

    Attributes:
        base: fingerprint of the one model it was trained for.
        cross: the cross layers, and the encoder's tensors with them; fp32 (see `CrossAttention` and `encode`).
        digest: content identity, over all of the above.
        base_name: what a person calls the model.
    """

    base: Fingerprint
    cross: CrossAttention = field(repr=False, compare=False)
    digest: str
    base_name: str = field(default="", compare=False)
    _cast: list[CrossAttention] = field(default_factory=list, repr=False, compare=False)

    @property
    def kind(self) -> str:
        return ENCODER

    def on(self, device: torch.device) -> Encoder:
        """The same with its tensors there."""
        named = {name: tensor.to(device) for name, tensor in self.cross.named.items()}
        return replace(self, cross=replace(self.cross, named=named), _cast=[])

    @property
    def encoded_behind(self) -> None:
        return None

    @property
    def side(self) -> frozenset[str]:
        return frozenset()

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

    def compile(
        self, model: LanguageModel, segments: Sequence[tuple[int, ...]], counter: RowCounter | None = None
    ) -> Iterator[tuple[int, CompiledSegment]]:
        """As `Writer.compile`.

        Raises:
            WriterMismatchError: `model` is not the one it was trained for.
        """
        self.check(model)
        lengths = [len(ids) for ids in segments]
        for batch in batches(lengths):
            with model.alone(), torch.no_grad():
                pairs = encode(model, padded([segments[i] for i in batch]), [lengths[i] for i in batch], self.cross)
            if counter is not None:
                rows = len(batch) * pairs[0].shape[3]
                counter.rows += rows
                counter.token_layers += rows * self.cross.layers
            for row, i in enumerate(batch):
                # a copy: the segment outlives the batch, and a view would keep all of it in memory
                keys, values = (each[:, row, :, : lengths[i]].clone().contiguous().cpu() for each in pairs)
                yield i, CompiledSegment(segments[i], keys, values)

    def looking(self, model: LanguageModel, segments: Sequence[CompiledSegment], parts: Parts) -> Parts:
        """`parts`, and the cross layers over `segments`, in whatever order they are."""
        if not self._cast:  # once: a decoded token would otherwise cost a copy of all weights
            named = {n: t.to(model.device, model.dtype) for n, t in self.cross.named.items() if n.startswith("cross.")}
            self._cast.append(replace(self.cross, named=named))
        with torch.no_grad():
            keys, values = (
                torch.cat(each, 2).to(model.device)
                for each in ([s.keys for s in segments], [s.values for s in segments])
            )
            return replace(parts, cross=self._cast[0].over(keys, values))

    def check(self, model: LanguageModel) -> None:
        """Raise `WriterMismatchError`, saying what differs, unless `model` is the one it was trained for."""
        check_base("this encoder", self.base, self.base_name, model)

    def save(self, path: Path, recipe: Mapping[str, Any] = NOTHING, metrics: Mapping[str, Any] = NOTHING) -> str:
        """Write the folder that `from_folder` reads, as `Trained.save` does; returns `digest`."""
        about = manifest(ENCODER, self.digest, self.base, self.base_name, recipe, metrics) | {"every": self.cross.every}
        tensors = {name: tensor.cpu() for name, tensor in self.cross.named.items()}
        save_folder(path, about, {WEIGHTS: save(tensors, {"format": "pt"})})
        return self.digest

    @classmethod
    def from_folder(cls, about: Mapping[str, Any], files: Mapping[str, bytes]) -> Encoder:
        """From what `load_folder` gives, which has verified the files.

        Raises:
            InputError, WriterError: tensors that do not go together, or content that is not what was saved.
            KeyError, TypeError, ValueError: something is missing, or has another form.
        """
        tensors, name = read_tensors(files, WEIGHTS), str(about["base"]["name"])
        made = make_encoder(base_of(about), tensors, int(about["every"]), name)
        check_content(made.digest, about)
        return made


def make_encoder(base: Fingerprint, named: Mapping[str, torch.Tensor], every: int, base_name: str = "") -> Encoder:
    """A writer of trained tensors, which are copied: what is trained on does not change it.

    Args:
        base: of the model that it was trained for.
        named: see `Encoder.cross`; kept in fp32.
        base_name: what a person calls the model.

    Raises:
        InputError: tensors of no cross layer, or not finite.
    """
    if "cross.0.q_proj" not in named or not all(bool(torch.isfinite(t).all()) for t in named.values()):
        raise InputError("parts", "an encoder has at least one cross layer, and all its numbers are finite")
    kept = copied(named)
    parts: list[tuple[str, bytes | str | None]] = [("base", base.digest), ("every", str(every))]
    parts += [(f"{name} {tuple(t.shape)}", t.cpu().numpy().tobytes()) for name, t in kept.items()]
    digest = digest_fields("kvquilt 2026-11 writer encoder v1", parts)
    return Encoder(base, CrossAttention(every, kept), digest, base_name)


def depth(writer: Writer) -> int | None:
    """Layers of the writer's segments, if not as many as the model has."""
    return writer.cross.layers if isinstance(writer, Encoder) else None


def unplaced(placement: Placement, writers: Mapping[int, Writer], method: Method) -> Placement:
    """The placement without slots for documents that are encoded.

    Args:
        writers: by run.

    Raises:
        InputError: the method would compute rows of theirs, or there is no text beside them.
    """
    mine = [i for i, writer in writers.items() if isinstance(writer, Encoder)]
    if not mine:
        return placement
    out = placement.without_slots(mine)
    if not isinstance(method.selector, Nothing) or method.correction or method.order is Order.DENSITY_ASCENDING:
        raise InputError("writer", "an encoder's documents take no rows that could be computed again", method.name)
    if not out.tokens:
        raise InputError("prompt", "needs text beside its documents: an encoder's take no rows")
    return out


def looking(model: LanguageModel, beside: Sequence[tuple[Writer, CompiledSegment]], parts: Parts) -> Parts:
    """`parts`, and what it takes to see the documents that have no slots, all of one writer."""
    for writer, _ in beside[:1]:
        if isinstance(writer, Encoder):
            return writer.looking(model, [segment for _, segment in beside], parts)
    return parts
