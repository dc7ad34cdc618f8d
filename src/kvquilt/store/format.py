"""The file of one compiled segment: safetensors with keys, values, ids, side data, and a checksum over all of it.

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces so that the tensors start on a 64-byte boundary
    keys      [layers, kv_heads, tokens, key_dim]
    values    [layers, kv_heads, tokens, value_dim]
    ids       int32 [tokens]
    side.*    side data by name, any dtype and shape; most files have none

The checksum is blake3 over the length, the header with 64 zeros in the checksum's place, and the tensors: a
damaged start position would be as wrong as a damaged key.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvquilt.errors import InputError
from kvquilt.identity import SegmentKey
from kvquilt.store.base import MissReason

if TYPE_CHECKING:  # listing and verifying must not wait for torch
    import torch

    from kvquilt.segment import CompiledSegment

FORMAT_VERSION = "1"
_ALIGNMENT = 64
_MAX_HEADER = 1 << 16
_PARALLEL_BYTES = 1 << 19
_NO_CHECKSUM = "0" * 64
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
}
_SIDE = "side."
_SIDE_NAME = re.compile(r"[a-z0-9-]{1,64}")


class DamageError(Exception):
    """The bytes are not a sound segment file; never leaves `kvquilt.store`."""

    def __init__(self, reason: MissReason) -> None:
        self.reason = reason
        super().__init__(reason.value)


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor of side data; offsets count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    at: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header; offsets count from the start of the file."""

    key: SegmentKey
    dtype: str
    keys_shape: tuple[int, ...]
    values_shape: tuple[int, ...]
    start: int
    prefix: str
    checksum: str
    keys_at: int
    values_at: int
    ids_at: int
    ids_end: int
    end: int
    side: Mapping[str, Span]

    @property
    def tokens(self) -> int:
        return self.keys_shape[2]


def encode(key: SegmentKey, segment: CompiledSegment) -> list[memoryview]:
    """The file's bytes in order, without copying tensors that are contiguous and on the CPU."""
    _check(segment)
    dtype = _dtype_name(segment.keys)
    tensors: dict[str, tuple[str, list[int], memoryview]] = {
        "keys": (dtype, list(segment.keys.shape), _raw(segment.keys)),
        "values": (dtype, list(segment.values.shape), _raw(segment.values)),
        "ids": ("I32", [segment.tokens], memoryview(pack_ids(segment.ids))),
    }
    for name, tensor in segment.side.items():
        tensors[_SIDE + name] = (_dtype_name(tensor), list(tensor.shape), _raw(tensor))
    header: dict[str, Any] = {
        "__metadata__": {
            "version": FORMAT_VERSION,
            "namespace": key.namespace,
            "digest": key.digest,
            "start": str(segment.start),
            "prefix": segment.prefix,
            "dtype": dtype,
            "checksum": _NO_CHECKSUM,
        }
    }
    offset = 0
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + raw.nbytes]}
        offset += raw.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    payload = [raw for _, _, raw in tensors.values()]
    digest = _digest([memoryview(head), *payload])
    marked = head.replace(b'"checksum":"' + _NO_CHECKSUM.encode(), b'"checksum":"' + digest.encode(), 1)
    return [memoryview(marked), *payload]


def parse(start: bytes | memoryview, size: int) -> Header:
    """Header of a file of `size` bytes that begins with `start` (at least `header_bytes` of it)."""
    length = header_bytes(start, size)
    try:
        fields = json.loads(bytes(start[8:length]))
        meta, keys, values, ids = (fields[name] for name in ("__metadata__", "keys", "values", "ids"))
        if meta["version"] != FORMAT_VERSION:
            raise DamageError(MissReason.WRONG_VERSION)
        if meta["dtype"] != keys["dtype"] or keys["dtype"] != values["dtype"] or ids["dtype"] != "I32":
            raise DamageError(MissReason.CORRUPT)
        # in the order of the header, which is the order in the file
        extra = {name: part for name, part in fields.items() if name not in ("__metadata__", "keys", "values", "ids")}
        if not all(name.startswith(_SIDE) and _SIDE_NAME.fullmatch(name[len(_SIDE) :]) for name in extra):
            raise DamageError(MissReason.CORRUPT)
        parts = [keys, values, ids, *extra.values()]
        shapes = [tuple(int(n) for n in part["shape"]) for part in parts]
        spans = [tuple(part["data_offsets"]) for part in parts]
        bounds = [0]
        for shape, part in zip(shapes, parts, strict=True):
            bounds.append(bounds[-1] + math.prod(shape) * _WIDTHS[part["dtype"]])
        side = {
            name[len(_SIDE) :]: Span(part["dtype"], shape, length + at, length + end)
            for (name, part), shape, (at, end) in zip(extra.items(), shapes[3:], pairwise(bounds[3:]), strict=True)
        }
        header = Header(
            key=SegmentKey(str(meta["namespace"]), str(meta["digest"])),
            dtype=meta["dtype"],
            keys_shape=shapes[0],
            values_shape=shapes[1],
            start=int(meta["start"]),
            prefix=str(meta["prefix"]),
            checksum=str(meta["checksum"]),
            keys_at=length,
            values_at=length + bounds[1],
            ids_at=length + bounds[2],
            ids_end=length + bounds[3],
            end=length + bounds[-1],
            side=side,
        )
        sound = (
            spans == list(pairwise(bounds))
            and _consistent(shapes[:3])
            and all(n >= 0 for shape in shapes for n in shape)
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamageError(MissReason.CORRUPT) from error
    if not sound or header.end < size:
        raise DamageError(MissReason.CORRUPT)
    if header.end > size:
        raise DamageError(MissReason.TRUNCATED)
    return header


def header_bytes(start: bytes | memoryview, size: int) -> int:
    """How many bytes stand before the tensors."""
    if size < 8 or len(start) < 8:
        raise DamageError(MissReason.TRUNCATED)
    length = 8 + int(struct.unpack("<Q", bytes(start[:8]))[0])
    if length > _MAX_HEADER or length % _ALIGNMENT:
        raise DamageError(MissReason.CORRUPT)
    if length > size or length > len(start):
        raise DamageError(MissReason.TRUNCATED)
    return length


def stored_tokens(path: Path) -> int:
    """Tokens of the segment in `path`, 0 for a damaged file; the tensors are not read."""
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            start = handle.read(8)
            length = int.from_bytes(start, "little")
            return parse(start + handle.read(min(length, _MAX_HEADER)), size).tokens
    except (DamageError, OSError):
        return 0


def verify_checksum(content: memoryview, header: Header) -> None:
    """Raise `DamageError` unless every bit of the file is as it was written."""
    head = bytes(content[: header.keys_at])
    mark = b'"checksum":"' + header.checksum.encode()
    plain = head.replace(mark, b'"checksum":"' + _NO_CHECKSUM.encode(), 1)
    if _digest([memoryview(plain), content[header.keys_at : header.end]]) != header.checksum:
        raise DamageError(MissReason.CORRUPT)


def decode(content: torch.Tensor, header: Header, ids: tuple[int, ...]) -> CompiledSegment:
    """A segment whose tensors are views of `content`, the uint8 bytes of the whole file.

    `ids` become the segment's ids; the caller has compared them with the file's.
    """
    import torch

    from kvquilt.segment import CompiledSegment

    dtype = getattr(torch, _TORCH_NAMES[header.dtype])
    keys = content[header.keys_at : header.values_at].view(dtype).view(header.keys_shape)
    values = content[header.values_at : header.ids_at].view(dtype).view(header.values_shape)
    side = {name: _tensor(content, span) for name, span in header.side.items()}
    return CompiledSegment(ids, keys, values, header.start, header.prefix, side)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as the file holds them."""
    try:
        return array("i", ids).tobytes()
    except OverflowError as error:
        raise InputError("ids", "token ids fit in 31 bits") from error


def _tensor(content: torch.Tensor, span: Span) -> torch.Tensor:
    import torch

    raw = content[span.at : span.end]
    # nothing may stand between the tensors of such a file, so an odd number of small elements displaces larger ones
    aligned = raw if span.at % _WIDTHS[span.dtype] == 0 else raw.clone()
    return aligned.view(getattr(torch, _TORCH_NAMES[span.dtype])).view(span.shape)


def _dtype_name(tensor: torch.Tensor) -> str:
    """The file's name for the dtype."""
    for name, torch_name in _TORCH_NAMES.items():
        if str(tensor.dtype) == f"torch.{torch_name}":
            return name
    raise InputError("segment", "its tensors have a storable dtype", str(tensor.dtype))


def _consistent(shapes: list[tuple[int, ...]]) -> bool:
    keys, values, ids = shapes
    if len(keys) != 4 or len(values) != 4 or len(ids) != 1 or min(*keys, *values, *ids) < 0:
        return False
    return keys[:3] == values[:3] and keys[2] == ids[0]


def _check(segment: CompiledSegment) -> None:
    keys, values = segment.keys, segment.values
    if not _consistent([tuple(keys.shape), tuple(values.shape), (segment.tokens,)]):
        got = f"keys {tuple(keys.shape)}, values {tuple(values.shape)}, {segment.tokens} ids"
        raise InputError("segment", "keys and values are [layers, kv_heads, tokens, dim] of the same tokens", got)
    if keys.dtype != values.dtype:
        raise InputError("segment", "keys and values share one dtype", f"{keys.dtype}, {values.dtype}")
    for name in segment.side:
        if not _SIDE_NAME.fullmatch(name):
            raise InputError("segment", "names of side data are one to 64 of a-z, 0-9 and -", name)


def _raw(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def _digest(parts: Sequence[memoryview]) -> str:
    # below this a second thread gains nothing, and on a busy machine its start is waited for
    large = sum(part.nbytes for part in parts) >= _PARALLEL_BYTES
    state = blake3(max_threads=blake3.AUTO if large else 1)
    for part in parts:
        state.update(part)
    return state.hexdigest()
