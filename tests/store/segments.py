"""Small compiled segments whose content follows from their ids, so that every read can be checked."""

from __future__ import annotations

import torch

from kvquilt.identity import SegmentKey, segment_key
from kvquilt.segment import CompiledSegment

Wanted = tuple[SegmentKey, tuple[int, ...]]


def make(number: int, tokens: int = 4, dtype: torch.dtype = torch.float32, layers: int = 2) -> CompiledSegment:
    ids = tuple(range(number, number + tokens))
    generator = torch.Generator().manual_seed(number)
    keys = torch.randn(layers, 2, tokens, 8, generator=generator).to(dtype)
    values = torch.randn(layers, 2, tokens, 4, generator=generator).to(dtype)
    return CompiledSegment(ids, keys, values, start=number % 7, prefix="ab" * (number % 2))


def noted(number: int, tokens: int = 4, dtype: torch.dtype = torch.float32) -> CompiledSegment:
    """`make` with side data of every kind: fp32 per token, integers, the model's dtype, nothing at all."""
    plain = make(number, tokens, dtype)
    generator = torch.Generator().manual_seed(number)
    side = {
        "outside": torch.rand(tokens, generator=generator),
        "digest": torch.arange(6, dtype=torch.int32).view(2, 3) + number,
        "residual-1": torch.randn(tokens, 16, generator=generator).to(dtype),
        "inter": torch.zeros(0),
        "earlier": torch.arange(3, dtype=torch.uint8),
    }
    return CompiledSegment(plain.ids, plain.keys, plain.values, plain.start, plain.prefix, side)


def key_of(segment: CompiledSegment, tenant: str | None = None) -> SegmentKey:
    return segment_key("fingerprint", "writer", tenant, segment.ids)


def wanted(segment: CompiledSegment, tenant: str | None = None) -> Wanted:
    return key_of(segment, tenant), segment.ids


def same(left: CompiledSegment | None, right: CompiledSegment | None) -> bool:
    """Bit for bit, NaN payloads and signs of zero included."""
    return (
        left is not None
        and right is not None
        and (left.ids, left.start, left.prefix) == (right.ids, right.start, right.prefix)
        and left.keys.dtype == right.keys.dtype
        and left.keys.shape == right.keys.shape
        and left.values.shape == right.values.shape
        and bits(left.keys) == bits(right.keys)
        and bits(left.values) == bits(right.values)
        and list(left.side) == list(right.side)
        and all(_same(left.side[name], right.side[name]) for name in left.side)
    )


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
