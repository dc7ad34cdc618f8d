"""Trained artefacts for their own model in another dtype: the same tensors, bound to the other fingerprint."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from kvquilt.identity import Fingerprint
from kvquilt.writers.artefact import load_writer, make_writer, read_manifest
from kvquilt.writers.block_tuned import BLOCK_TUNED, Tuning
from kvquilt.writers.encoder import Encoder, make_encoder
from kvquilt.writers.link_tokens import LinkTokens
from kvquilt.writers.trained import Trained

Artefact: TypeAlias = Trained | LinkTokens | Encoder | Tuning


def load_artefact(path: Path) -> Artefact:
    """What was trained, of whatever kind: a writer or a tuned reader.

    Raises:
        WriterError: as `load_writer`.
    """
    return Tuning.load(path) if read_manifest(path).get("kind") == BLOCK_TUNED else load_writer(path)


def rebound(artefact: Artefact, base: Fingerprint) -> Artefact:
    """A copy that is for the model of fingerprint `base`; that it is the same model is for the caller to know.

    What it compiles there is near, not equal, to what it compiles in the dtype that it was trained in: nothing that was
    measured of the one holds for the other.
    """
    name = artefact.base_name
    if isinstance(artefact, Tuning):
        return Tuning.of(base, artefact.named, artefact.alpha, name)
    if isinstance(artefact, Encoder):
        return make_encoder(base, artefact.cross.named, artefact.cross.every, name)
    if isinstance(artefact, LinkTokens):
        return LinkTokens.of(base, artefact.links, artefact.inner.prefix, name)
    return make_writer(artefact.kind, base, artefact.named(), artefact.alpha, artefact.prefix, name)
