"""What recipes remember about documents: small notes beside the segments, of one tenant and one model."""

from __future__ import annotations

import base64
import binascii
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvquilt.identity import digest_fields, encode_ids
from kvquilt.store import Store, Stored


@dataclass(frozen=True, slots=True)
class Use:
    """How often something was used, and how much that saved."""

    hits: int = 0
    saved: float = 0.0


@dataclass(eq=False, slots=True)
class Notebook:
    """Notes by kind and subject. Safe from any thread and process: a note is replaced as a whole, the last one wins,
    and whoever loses an update has something compiled again.

    Keep one per tenant: it collects uses, so that an answer need not wait for a disk; what is not written yet is
    forgotten with it.

    Attributes:
        failures: notes that could not be written.
    """

    store: Store
    namespace: str
    fingerprint: str
    failures: int = 0
    _uses: dict[str, dict[str, Use]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, kind: str, subject: str) -> dict[str, Any] | None:
        """The note, or None where there is none that can be trusted. What it holds is the reader's to check.

        Args:
            kind: of a-z, 0-9 and -, at most 63.
            subject: a digest of everything that the note depends on but the model.
        """
        return self.store.read_note(self.namespace, self._name(kind, subject))

    def write(self, kind: str, subject: str, content: Mapping[str, Any]) -> bool:
        """Replace the note; False, and counted, where the store cannot keep it."""
        kept = isinstance(self.store.write_note(self.namespace, self._name(kind, subject), content), Stored)
        with self._lock:
            self.failures += not kept
        return kept

    def use(self, subject: str, what: str, saved: float) -> int:
        """Count a use of `what`; returns how many uses of the subject wait to be written."""
        with self._lock:
            uses = self._uses.setdefault(subject, {})
            old = uses.get(what, Use())
            uses[what] = Use(old.hits + 1, old.saved + saved)
            return sum(each.hits for each in uses.values())

    def take_uses(self, subject: str) -> dict[str, Use]:
        """The uses that wait, which the caller writes."""
        with self._lock:
            return self._uses.pop(subject, {})

    def _name(self, kind: str, subject: str) -> str:
        named = [("fingerprint", self.fingerprint), ("subject", subject)]
        return f"{kind}-{digest_fields('kvquilt 2026-11 note v1', named)}"


def pack(ids: tuple[int, ...]) -> str:
    """Token ids as a note holds them."""
    return base64.b64encode(encode_ids(ids)).decode()


def unpack(text: object) -> tuple[int, ...] | None:
    """The ids of `pack`, or None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        raw = base64.b64decode(text, validate=True)
        ids = struct.unpack(f"<{len(raw) // 4}I", raw)
    except (binascii.Error, ValueError, struct.error):
        return None
    return ids if max(ids, default=0) < 1 << 31 else None
