"""Writers that were trained: KV Packet (arXiv 2604.13226), SemPIC (arXiv 2607.28069), and both together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from kvquilt.errors import InputError, WriterMismatchError
from kvquilt.identity import Fingerprint
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts, soft_ids
from kvquilt.segment import CompiledSegment
from kvquilt.writers.batches import compile_batches
from kvquilt.writers.folder import ADAPTER, CONFIG, SOFT_TOKENS, save_folder
from kvquilt.writers.manifest import NOTHING, check_base, manifest
from kvquilt.writers.peft_layout import config_text, to_peft
from kvquilt.writers.prefix_cache import PrefixCache
from kvquilt.writers.tensors import STORED, content_digest, misfit, moved, sizes_of

TRAINED = ("kv-packet", "sempic", "joint")  # kinds, and the names of their methods


@dataclass(frozen=True, slots=True)
class Trained:
    """Each document between a trained header and trailer, by the model with a trained adapter on; the reader is plain.

    Either may be missing: without the adapter it is KV Packet, without soft tokens SemPIC. Nothing it compiles is
    exact.

    Attributes:
        kind: what `kvquilt` calls it: ``kv-packet``, ``sempic``, ``joint``.
        base: fingerprint of the one model it was trained for.
        parts: the adapter, and the header's soft rows followed by the trailer's.
        alpha: of the adapter; over its rank it is the scaling.
        prefix: ids that documents are encoded behind; the plain model reads them.
        digest: content identity, over all of the above.
        base_name: what a person calls the model.
    """

    kind: str
    base: Fingerprint
    parts: Parts = field(repr=False, compare=False)
    alpha: float
    header: int
    trailer: int
    prefix: tuple[int, ...]
    digest: str
    base_name: str = field(default="", compare=False)

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
            yield from compile_batches(prefix, self.prefix, packets, moved(self.parts, model.device))

    def check(self, model: LanguageModel) -> None:
        """Raise `WriterMismatchError`, saying what differs, unless `model` is the one it was trained for."""
        check_base(f"this {self.kind} writer", self.base, self.base_name, model)
        self.check_fit(model)

    def check_fit(self, model: LanguageModel) -> None:
        """Raise `WriterMismatchError` unless its parts have the sizes of the model's layers."""
        embeddings: Any = model.hf.get_input_embeddings()
        if why := misfit(self.parts, model.hf.base_model, embeddings.weight.shape[1]):
            raise WriterMismatchError(f"{model.name} has no place for this {self.kind} writer: {why}")

    def on(self, device: torch.device) -> Trained:
        """The same with its tensors there."""
        return replace(self, parts=moved(self.parts, device))

    def named(self) -> dict[str, torch.Tensor]:
        """Its tensors as `kvquilt.model.parts.parts_of` takes them."""
        out = {}
        if self.parts.soft is not None:
            sides = {"header": self.parts.soft[: self.header], "trailer": self.parts.soft[self.header :]}
            out = {name: rows for name, rows in sides.items() if len(rows)}
        adapter = self.parts.adapter
        for name, (a, b) in () if adapter is None else adapter.pairs.items():
            out |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
        return out

    def save(
        self,
        path: Path,
        recipe: Mapping[str, Any] = NOTHING,
        metrics: Mapping[str, Any] = NOTHING,
        stored: str = "float32",
    ) -> str:
        """Write the folder that `kvquilt.writers.artefact.load_writer` reads; see there for its files.

        What was there is replaced as a whole or not at all; other files in the folder stay. Two saves give equal bytes.

        Args:
            recipe, metrics: JSON: how it was trained, what was measured.
            stored: ``bfloat16`` halves the files; what is loaded then is a rounded writer with a digest of its own.

        Returns:
            The digest of the writer as it will be loaded.

        Raises:
            InputError: `stored` is no such dtype, or `recipe` or `metrics` no JSON.
            OSError: as the file system gives it; the writer that was there stays whole.
        """
        if stored not in STORED:
            raise InputError("stored", "float32 or bfloat16", stored)
        named = {name: t.cpu().to(STORED[stored]).contiguous() for name, t in self.named().items()}
        adapter = to_peft(named)
        soft = {name: t for name, t in named.items() if name in ("header", "trailer")}
        files = {}
        if adapter:
            files[CONFIG] = config_text(named, self.alpha, self.base_name).encode()
            files[ADAPTER] = save(adapter, {"format": "pt"})
        if soft:
            files[SOFT_TOKENS] = save(soft, {"format": "pt"})
        digest = content_digest(self.kind, self.base, named, self.alpha, self.prefix)
        about = {
            **manifest(self.kind, digest, self.base, self.base_name, recipe, metrics),
            "sizes": sizes_of(named),
            "alpha": self.alpha,
            "prefix": list(self.prefix),
            "stored": stored,
        }
        save_folder(path, about, files)
        return digest
