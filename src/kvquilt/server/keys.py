"""API keys: a file that holds their digests, and who owns the one that a request brings."""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvquilt.errors import InputError
from kvquilt.files import write_atomically, writing
from kvquilt.identity import namespace

log = logging.getLogger(__name__)
_VERSION = 1
_PREFIX = "kvq-"


@dataclass(frozen=True, slots=True)
class Key:
    """One key as the file has it. Keys are 256 random bits, so a keyed digest is enough; nobody can try them all."""

    id: str
    tenant: str
    created: int
    digest: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """Keys of all tenants under one salt. Written for nobody but the owner.

    Raises:
        InputError: the file is damaged, of another version, or readable by others.
    """

    salt: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    keys: tuple[Key, ...] = ()

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        try:
            if os.name == "posix" and path.stat().st_mode & 0o077:
                raise InputError("api-keys", "others can read or change this file; chmod 600 it", str(path))
            data = json.loads(path.read_bytes())
            if data["version"] != _VERSION:
                raise InputError("api-keys", "is of another version", data["version"])
            return cls(bytes.fromhex(data["salt"]), tuple(Key(**each) for each in data["keys"]))
        except FileNotFoundError:
            raise InputError("api-keys", "no such file; `kvquilt keys add` makes one", str(path)) from None
        except OSError as error:
            raise InputError("api-keys", f"cannot be read: {error.strerror}", str(path)) from None
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("api-keys", "is damaged", str(path)) from None

    def write(self, path: Path) -> None:
        """
        Raises:
            StoreUnavailableError: the file system refuses.
        """
        data: dict[str, Any] = {"version": _VERSION, "salt": self.salt.hex(), "keys": [asdict(k) for k in self.keys]}
        with writing(path):
            write_atomically(path, json.dumps(data, indent=2).encode(), private=True)

    def added(self, tenant: str) -> tuple[KeyFile, Key, str]:
        """The file with a new key of this tenant, and the key itself, which nobody can read from the file."""
        if not tenant.strip() or len(tenant) > 128:
            raise InputError("tenant", "must be a name of at most 128 characters", tenant)
        namespace(tenant)
        secret = _PREFIX + secrets.token_urlsafe(32)
        key = Key(secrets.token_hex(4), tenant, int(time.time()), self._digest(secret))
        return replace(self, keys=(*self.keys, key)), key, secret

    def without(self, id: str) -> KeyFile:
        """
        Raises:
            InputError: there is no key of that id.
        """
        kept = tuple(key for key in self.keys if key.id != id)
        if len(kept) == len(self.keys):
            raise InputError("id", "there is no such key; `kvquilt keys list` shows them", id)
        return replace(self, keys=kept)

    def owner(self, secret: str) -> str | None:
        """The tenant whose key this is. Takes as long for every key, right or wrong, first or last."""
        digest, found = self._digest(secret), None
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest):
                found = key.tenant
        return found

    @property
    def tenants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key.tenant for key in self.keys))

    def _digest(self, secret: str) -> str:
        return blake3(secret.encode(errors="replace"), key=self.salt).hexdigest()


class Keyring:
    """The key file of a running server, read again when it changes: a revoked key is refused with the next request.

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
