"""What produced a cache, and the key under which it is stored.

Every digest is blake3 with 256 bits over a canonical encoding: a domain-separated context, then for each field
its name, a presence byte and its bytes, each length-prefixed, so that no two assignments of fields share an
encoding. An unknown or absent field is encoded as absent, never as empty.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

from blake3 import blake3

from kvquilt.errors import InputError

PUBLIC = "*"  # the tenant whose documents all others may read, and nobody else's name
_KEY_CONTEXT = "kvquilt 2026-11 segment key v1"
_FINGERPRINT_CONTEXT = "kvquilt 2026-11 fingerprint v1"
_NAMESPACE_CONTEXT = "kvquilt 2026-11 tenant namespace v1"


def digest_fields(context: str, named: Sequence[tuple[str, bytes | str | None]]) -> str:
    """Hex digest (64 characters) of named fields under a domain-separation context."""
    state = blake3(derive_key_context=context)
    for name, value in named:
        raw = value.encode() if isinstance(value, str) else value
        label = name.encode()
        state.update(struct.pack("<I", len(label)) + label)
        state.update(b"\x00" if raw is None else b"\x01" + struct.pack("<Q", len(raw)) + raw)
    return state.hexdigest()


def encode_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the canonical form inside keys."""
    return struct.pack(f"<{len(ids)}I", *ids)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of the model side of a cache; each field is a hex digest or a canonical name."""

    weights: str
    tokenizer: str
    rope: str
    dtype: str

    @property
    def digest(self) -> str:
        return digest_fields(_FINGERPRINT_CONTEXT, [(f.name, getattr(self, f.name)) for f in fields(self)])


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """Where a compiled segment lives: the tenant's namespace (32 hex) and the content digest (64 hex)."""

    namespace: str
    digest: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.digest}"


def namespace(tenant: str | None) -> str:
    """The tenant's namespace, 32 hex characters (128 bits). ``None`` is a namespace of its own.

    Raises:
        InputError: `tenant` is neither valid Unicode nor ``None``.
    """
    _check_tenant(tenant)
    return digest_fields(_NAMESPACE_CONTEXT, [("tenant", tenant)])[:32]


def segment_key(fingerprint: str, writer: str, tenant: str | None, ids: Sequence[int]) -> SegmentKey:
    """Key of the segment `ids` compiled by `writer` (its content digest) on the model `fingerprint`.

    Raises:
        InputError: `tenant` is neither valid Unicode nor ``None``.
    """
    _check_tenant(tenant)
    fields_ = [("fingerprint", fingerprint), ("writer", writer), ("tenant", tenant), ("ids", encode_ids(ids))]
    return SegmentKey(namespace(tenant), digest_fields(_KEY_CONTEXT, fields_))


def _check_tenant(tenant: object) -> None:
    if tenant is None:
        return
    if not isinstance(tenant, str):
        raise InputError("tenant", "must be a string or None", type(tenant).__name__)
    try:
        tenant.encode()
    except UnicodeEncodeError as error:
        raise InputError("tenant", f"must be valid Unicode; it has a lone surrogate at offset {error.start}") from None
