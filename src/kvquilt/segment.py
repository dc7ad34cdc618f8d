"""Compiled segments and the one place where keys are rotated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from kvquilt.identity import digest_fields, encode_ids

if TYPE_CHECKING:
    from kvquilt.model.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class CompiledSegment:
    """Keys and values of every layer for one segment, on the CPU; never written after construction.

    Attributes:
        ids: the segment's token ids; compared after every digest hit.
        keys: ``[layers, kv_heads, tokens, key_dim]``, model dtype, rotated for positions
            ``start .. start + tokens - 1``.
        values: ``[layers, kv_heads, tokens, value_dim]``, model dtype.
        start: position of the first row in the stored keys: 0 is the local frame; a segment encoded behind a
            shared prefix keeps the position it was encoded at, so that it is rotated once, not twice.
        prefix: hex digest of the ids it was encoded behind, or "" for none.
        side: what else the writer noted, by name; CPU tensors of any shape and dtype. Cannot be changed.
    """

    ids: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor
    start: int = 0
    prefix: str = ""
    side: Mapping[str, torch.Tensor] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # a copy in one order: whoever passed the mapping may go on writing to it, and equal segments give equal files
        object.__setattr__(self, "side", MappingProxyType(dict(sorted(self.side.items()))))

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and side data."""
        return self.keys.nbytes + self.values.nbytes + sum(tensor.nbytes for tensor in self.side.values())


def prefix_digest(ids: Sequence[int]) -> str:
    """Digest of the ids a segment was encoded behind; "" for none."""
    return digest_fields("kvquilt 2026-11 prefix v1", [("ids", encode_ids(ids))]) if ids else ""


def place(segment: CompiledSegment, position: int, tables: Sequence[RotaryTable | None], out: torch.Tensor) -> None:
    """Write the segment's keys, moved so that its first row stands at `position`, into `out`.

    Products are fp32 and the result is cast once; a segment that already stands at `position` is copied bit for bit.

    Args:
        tables: one rotary table per layer; ``None`` for a layer without rotation.
        out: ``[layers, kv_heads, tokens, key_dim]``, any strides, dtype of the keys, the model's device. Overwritten.
    """
    delta = position - segment.start
    keys = segment.keys.to(out.device, non_blocking=True)
    if delta == 0:
        out.copy_(keys)
        return
    first = 0
    for _, same in groupby(tables, key=id):  # neighbouring layers with one table turn together
        table, *others = same
        last = first + 1 + len(others)
        if table is None:
            out[first:last].copy_(keys[first:last])
        else:
            table.rotate(keys[first:last], delta, out[first:last])
        first = last
