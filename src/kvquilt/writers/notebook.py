"""What recipes remember about documents: small notes beside the segments, of one tenant and one model."""

from __future__ import annotations

import base64
import binascii
import logging
import math
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvquilt.errors import IntegrityError
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.store import Store, Stored

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Use:
    """How often something was used, and how much that saved."""

    hits: int = 0
    saved: float = 0.0


@dataclass(frozen=True, slots=True)
class NotebookStats:
    """What a notebook counted.

    Attributes:
        waiting: uses that are not written yet, of `subjects` documents.
        failures: notes that could not be written.
        lost: notes found to say nothing that can be used, and not written again since.
    """

    waiting: int
    subjects: int
    failures: int
    lost: int


@dataclass(eq=False, slots=True)
class Notebook:
    """Notes by kind and subject. Safe from any thread and process: a note is replaced as a whole, the last one wins,
    and whoever loses an update has something compiled again.

    Keep one per tenant: it collects uses, so that an answer need not wait for a disk; what is not written yet is
    forgotten with it.

    Attributes:
        vocabulary: ids that the model has an embedding for; a note with others is lost.
    """

    store: Store
    namespace: str
    fingerprint: str
    vocabulary: int
    _failures: int = field(default=0, repr=False)
    _lost: set[str] = field(default_factory=set, repr=False)
    _uses: dict[str, dict[str, Use]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, kind: str, subject: str) -> dict[str, Any] | None:
        """The note, or None where there is none that can be trusted. What it holds is the reader's to check, and to
        report to `lose`.

        Args:
            kind: of a-z, 0-9 and -, at most 63.
            subject: a digest of everything that the note depends on but the model.
        """
        return self.store.read_note(self.namespace, self._name(kind, subject))

    def write(self, kind: str, subject: str, content: Mapping[str, Any]) -> bool:
        """Replace the note; False, and counted, where the store cannot keep it."""
        name = self._name(kind, subject)
        kept = isinstance(self.store.write_note(self.namespace, name, content), Stored)
        with self._lock:
            self._failures += not kept
            if kept:
                self._lost.discard(name)
        return kept

    def lose(self, kind: str, subject: str) -> None:
        """Count a note that says nothing its reader can use, and log it the first time: it counts as none."""
        name = self._name(kind, subject)
        with self._lock:
            new = name not in self._lost
            self._lost.add(name)
        if new:
            log.warning("a note of %s cannot be used and counts as none", kind)

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

    def apart(self) -> Notebook:
        """The same notes for who only looks: its uses count nowhere."""
        return replace(self, _uses={})

    def stats(self) -> NotebookStats:
        with self._lock:
            waiting = sum(use.hits for uses in self._uses.values() for use in uses.values())
            return NotebookStats(waiting, len(self._uses), self._failures, len(self._lost))

    def check_integrity(self) -> None:
        """Raise `IntegrityError` for uses that no note may hold, since they would be written into one."""
        with self._lock:
            for subject, uses in self._uses.items():
                for use in uses.values():
                    if use.hits < 1 or not (math.isfinite(use.saved) and use.saved >= 0):
                        raise IntegrityError(f"notebook: {use.hits} uses of {subject[:12]} that saved {use.saved}")

    def _name(self, kind: str, subject: str) -> str:
        named = [("fingerprint", self.fingerprint), ("subject", subject)]
        return f"{kind}-{digest_fields('kvquilt 2026-11 note v1', named)}"


def pack(ids: tuple[int, ...]) -> str:
    """Token ids as a note holds them."""
    return base64.b64encode(encode_ids(ids)).decode()


def unpack(text: object, vocabulary: int) -> tuple[int, ...] | None:
    """The ids of `pack`, or None for anything else, ids from `vocabulary` on included."""
    if not isinstance(text, str):
        return None
    try:
        raw = base64.b64decode(text, validate=True)
        ids = struct.unpack(f"<{len(raw) // 4}I", raw)
    except (binascii.Error, ValueError, struct.error):
        return None
    return ids if max(ids, default=-1) < vocabulary else None
