"""What a run begins with instead of fresh tensors: the parts of an artefact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvquilt.identity import Fingerprint
from kvquilt.writers.artefact import load_writer, read_manifest
from kvquilt.writers.block_tuned import BLOCK_TUNED, Tuning
from kvquilt.writers.encoder import Encoder
from kvquilt.writers.link_tokens import LinkTokens


@dataclass(frozen=True, slots=True)
class Begun:
    """Tensors of an artefact of whatever kind, named as a shape draws them.

    Attributes:
        alpha: of the adapter; 0 where there is none.
        every: of the cross layers; 0 where there are none.
        prefix: ids that documents are encoded behind.
        base: fingerprint of the model that they were trained for.
        base_name: what a person calls it.
    """

    named: Mapping[str, torch.Tensor] = field(repr=False)
    alpha: float
    every: int
    prefix: tuple[int, ...]
    base: Fingerprint
    base_name: str

    @classmethod
    def read(cls, path: Path) -> Begun:
        """From an artefact's folder.

        Raises:
            WriterError: as `load_writer`.
        """
        if read_manifest(path).get("kind") == BLOCK_TUNED:
            tuning = Tuning.load(path)
            alpha = tuning.alpha if tuning.parts.adapter is not None else 0.0
            return cls(tuning.named, alpha, 0, (), tuning.base, tuning.base_name)
        found = load_writer(path)
        if isinstance(found, Encoder):
            return cls(found.cross.named, 0.0, found.cross.every, (), found.base, found.base_name)
        if isinstance(found, LinkTokens):
            return cls(found.named(), 0.0, 0, found.inner.prefix, found.base, found.base_name)
        alpha = found.alpha if found.parts.adapter is not None else 0.0
        return cls(found.named(), alpha, 0, found.prefix, found.base, found.base_name)
