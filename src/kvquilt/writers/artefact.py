"""Making a trained writer from its tensors, and loading one from its folder.

writer.json                 format, kind, base model, sizes, prefix, how it was trained and measured, checksums
adapter_config.json         as PEFT reads it, where there is an adapter
adapter_model.safetensors   the same
soft_tokens.safetensors     header [h, width], trailer [t, width], where there are any
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kvquilt.errors import InputError, WriterError, nearest
from kvquilt.identity import Fingerprint
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import SOFT, parts_of
from kvquilt.writers.block_tuned import BLOCK_TUNED
from kvquilt.writers.encoder import ENCODER, Encoder
from kvquilt.writers.folder import ADAPTER, CONFIG, MANIFEST, SOFT_TOKENS, load_folder
from kvquilt.writers.link_tokens import LINK_TOKENS, LinkTokens
from kvquilt.writers.manifest import base_of, check_content, understood
from kvquilt.writers.peft_layout import check_config, from_peft
from kvquilt.writers.tensors import STORED, check_named, content_digest, copied, read_tensors, sizes_of
from kvquilt.writers.trained import TRAINED, Trained


def make_writer(
    kind: str,
    base: Fingerprint,
    named: Mapping[str, torch.Tensor],
    alpha: float,
    prefix: tuple[int, ...] = (),
    base_name: str = "",
) -> Trained:
    """A writer of trained tensors, which are copied: what is trained on does not change it.

    Args:
        base: of the model that it was trained for.
        named: see `parts_of`; kept in fp32.
        prefix: ids that documents are encoded behind.
        base_name: what a person calls the model.

    Raises:
        InputError: an unknown kind, or tensors that do not go together.
    """
    _check_kind(kind)
    if not math.isfinite(alpha):
        raise InputError("alpha", "must be a finite number", alpha)
    if not all(0 <= i < SOFT for i in prefix):
        raise InputError("prefix", "must be token ids", prefix)
    check_named(named)
    kept = copied(named)
    header, trailer = (len(kept[name]) if name in kept else 0 for name in ("header", "trailer"))
    digest = content_digest(kind, base, kept, alpha, prefix)
    return Trained(kind, base, parts_of(kept, alpha), float(alpha), header, trailer, prefix, digest, base_name)


def load_writer(path: Path, model: LanguageModel | None = None) -> Trained | LinkTokens | Encoder:
    """The writer in a folder, verified to the last byte.

    Args:
        model: refuse the writer unless it was trained for just this model; it goes to the model's device.

    Raises:
        WriterError: the folder is missing, incomplete, damaged, of an unknown kind, of a newer format, or holds a tuned
            reader, which is no writer.
        WriterMismatchError: it was trained for another model; says what differs.
    """
    about, files = load_folder(path)
    if about.get("kind") == BLOCK_TUNED:
        raise WriterError(f"{path}: holds a tuned reader, another model: it is given when the engine is loaded")
    with understood(path):
        writer = _MADE.get(about["kind"], _made)(about, files)
    if model is not None:
        writer.check(model)
        return writer.on(model.device)
    return writer


def read_manifest(path: Path) -> dict[str, Any]:
    """What ``writer.json`` says of a writer whose files are whole: ``recipe`` and ``metrics`` among it.

    Raises:
        WriterError: as `load_writer`.
    """
    return load_folder(path)[0]


def _check_kind(kind: object) -> None:
    if kind not in TRAINED:
        raise InputError("kind", f"unknown{nearest(kind, TRAINED)}", kind)


def _made(about: Mapping[str, Any], files: Mapping[str, bytes]) -> Trained:
    _check_kind(about["kind"])
    adapter = from_peft(_tensors(ADAPTER, files, about["stored"]))
    named = {**_tensors(SOFT_TOKENS, files, about["stored"]), **adapter}
    check_named(named)
    _compare(sizes_of(named), about["sizes"])
    alpha = float(about["alpha"])
    if adapter:
        check_config(files[CONFIG], named, alpha)
    prefix = tuple(int(i) for i in about["prefix"])
    writer = make_writer(about["kind"], base_of(about), named, alpha, prefix, str(about["base"]["name"]))
    check_content(writer.digest, about)
    return writer


def _tensors(name: str, files: Mapping[str, bytes], stored: str) -> dict[str, torch.Tensor]:
    if name not in files:
        return {}
    tensors = read_tensors(files, name)
    for tensor, value in tensors.items():
        if value.dtype != STORED.get(stored):
            raise WriterError(f"{name}: {tensor} is {value.dtype}, but {MANIFEST} says {stored!r}")
    return tensors


def _compare(found: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Refuse other sizes than the manifest's, with the layers that are missing or too many."""
    for what in ("width", "header", "trailer", "rank"):
        if found[what] != said[what]:
            raise WriterError(f"{MANIFEST} says {what} {said[what]}, the files have {found[what]}")
    mine, theirs = found["layers"], said["layers"]
    for title, names in (
        ("missing", theirs.keys() - mine.keys()),
        ("too many", mine.keys() - theirs.keys()),
        ("of another size", {n for n in mine.keys() & theirs.keys() if mine[n] != theirs[n]}),
    ):
        if names:
            some = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            raise WriterError(f"{len(names)} adapted layers are {title}: {some}")


_MADE: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, bytes]], LinkTokens | Encoder]] = {
    LINK_TOKENS: LinkTokens.from_folder,
    ENCODER: Encoder.from_folder,
}
