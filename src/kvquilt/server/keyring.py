"""The key file of a running server."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from kvquilt.errors import InputError
from kvquilt.server.keys import KeyFile

log = logging.getLogger(__name__)


class Keyring:
    """The file, read again when it changes: a revoked key is refused with the next request.

    Raises:
        InputError: see `KeyFile`; or it holds no key.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._seen, self._file = self._stamp(), KeyFile.read(path)
        if not self._file.keys:
            raise InputError("api-keys", "holds no key; `kvquilt keys add` makes one", str(path))

    @property
    def file(self) -> KeyFile:
        """What holds now; no keys while the file cannot be read."""
        with self._lock:
            stamp = self._stamp()
            if stamp != self._seen:
                try:
                    self._file = KeyFile.read(self._path)
                except InputError as error:
                    log.error("no key is taken until this is mended: %s", error)
                    self._file = KeyFile()
                self._seen = stamp
            return self._file

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode
