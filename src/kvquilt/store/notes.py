"""Small JSON documents kept next to a namespace's segments, such as verdicts of the quality gate."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvquilt.errors import InputError
from kvquilt.store.base import Failure, FailureReason, Stored, failure_reason

if TYPE_CHECKING:
    from kvquilt.store.files import Files

_NAME = re.compile(r"[a-z0-9-]{1,128}")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")


class Notes:
    """Notes on disk, or in memory where there is no directory. A damaged note reads as none at all."""

    def __init__(self, files: Files | None = None) -> None:
        self._files = files
        self._memory: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def write(self, namespace: str, name: str, content: Mapping[str, Any]) -> Stored | Failure:
        """Replace the note atomically. `content` must be JSON."""
        place = _checked(namespace, name)
        text = json.dumps(content, sort_keys=True, allow_nan=False)
        if self._files is None:
            with self._lock:
                self._memory[place] = text
            return Stored(len(text))
        if not self._files.writable:
            return Failure(FailureReason.READ_ONLY)
        framed = json.dumps({"checksum": blake3(text.encode()).hexdigest(), "note": text}).encode()
        try:
            self._files.write(self._path(self._files, *place), framed)
        except OSError as error:
            return Failure(failure_reason(error))
        return Stored(len(framed))

    def read(self, namespace: str, name: str) -> dict[str, Any] | None:
        place = _checked(namespace, name)
        if self._files is None:
            with self._lock:
                text = self._memory.get(place)
            return None if text is None else dict(json.loads(text))
        try:
            framed = json.loads(self._path(self._files, *place).read_bytes())
            text = framed["note"]
            if blake3(text.encode()).hexdigest() != framed["checksum"]:
                return None
            return dict(json.loads(text))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def forget(self, namespace: str, name: str) -> bool | Failure:
        """Remove one note; whether there was one, sound or damaged."""
        place = _checked(namespace, name)
        if self._files is None:
            with self._lock:
                return self._memory.pop(place, None) is not None
        try:
            self._path(self._files, *place).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            return Failure(failure_reason(error))
        return True

    def remove(self, namespace: str | None = None) -> int:
        """Remove the notes of one namespace, or all; returns how many."""
        with self._lock:
            gone = [place for place in self._memory if namespace in (None, place[0])]
            for place in gone:
                del self._memory[place]
        if self._files is None or not self._files.writable:
            return len(gone)
        found = list(self._files.base.glob(f"{namespace or '*'}/notes/*.json"))
        for path in found:
            path.unlink(missing_ok=True)
        return len(found)

    def _path(self, files: Files, namespace: str, name: str) -> Path:
        return files.base / namespace / "notes" / f"{name}.json"


def _checked(namespace: str, name: str) -> tuple[str, str]:
    if not _NAMESPACE.fullmatch(namespace):
        raise InputError("namespace", "32 lower-case hex digits", namespace)
    if not _NAME.fullmatch(name):
        raise InputError("name", "one to 128 of a-z, 0-9 and -", name)
    return namespace, name
