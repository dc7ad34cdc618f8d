"""API keys and tenants' quotas, in a file that holds digests alone."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from blake3 import blake3
from filelock import FileLock

from kvquilt.errors import InputError
from kvquilt.files import write_atomically, writing
from kvquilt.identity import PUBLIC, namespace

_VERSION = 1
_PREFIX = "kvq-"


class Role(StrEnum):
    """What a key opens."""

    TENANT = "tenant"  # a tenant's own documents, and public ones to read
    PUBLISHER = "publisher"  # the public documents
    OPERATOR = "operator"  # numbers of all tenants, and nothing that any of them has


@dataclass(frozen=True, slots=True)
class Key:
    """One key as the file has it. Keys are 256 random bits, so a keyed digest is enough; nobody can try them all.

    Attributes:
        tenant: `PUBLIC` for a publisher's, "" for an operator's, and neither of them for a tenant's.
    """

    id: str
    tenant: str
    created: int
    digest: str = field(repr=False)
    role: Role = Role.TENANT

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", Role(self.role))
        if not (
            all(isinstance(each, str) for each in (self.id, self.tenant, self.digest)) and type(self.created) is int
        ):
            raise TypeError("a field of a key is of another type")
        self.tenant.encode()  # what UTF-8 cannot hold is no name
        owned = {Role.PUBLISHER: PUBLIC, Role.OPERATOR: ""}
        if self.tenant != owned.get(self.role, self.tenant) or (
            self.role is Role.TENANT and self.tenant in ("", PUBLIC)
        ):
            raise ValueError("a key of this role has another tenant")


@dataclass(frozen=True, slots=True)
class KeyFile:
    """Keys of all tenants under one salt. Written for nobody but the owner.

    Attributes:
        quotas: bytes of compiled segments of the tenants that have a quota of their own.

    Raises:
        InputError: the file is damaged, of another version, or readable by others.
    """

    salt: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    keys: tuple[Key, ...] = ()
    quotas: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        try:
            if os.name == "posix" and path.stat().st_mode & 0o077:
                raise InputError("api-keys", "others can read or change this file; chmod 600 it", str(path))
            data = json.loads(path.read_bytes())
            if data["version"] != _VERSION:
                raise InputError("api-keys", "is of another version", data["version"])
            quotas = dict(data.get("quotas", {}).items())
            if not all(type(size) is int and size >= 0 for size in quotas.values()):
                raise ValueError("a quota is no number of bytes")
            held = cls(bytes.fromhex(data["salt"]), tuple(Key(**each) for each in data["keys"]), quotas)
            held.find("")  # a salt or a digest that is none is found now, not by every request
            return held
        except FileNotFoundError:
            raise InputError("api-keys", "no such file; `kvquilt keys add` makes one", str(path)) from None
        except OSError as error:
            raise InputError("api-keys", f"cannot be read: {error.strerror}", str(path)) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError("api-keys", "is damaged", str(path)) from None

    def write(self, path: Path) -> None:
        """
        Raises:
            StoreUnavailableError: the file system refuses.
        """
        data: dict[str, Any] = {"version": _VERSION, "salt": self.salt.hex(), "keys": [asdict(k) for k in self.keys]}
        data["quotas"] = dict(self.quotas)
        with writing(path):
            write_atomically(path, json.dumps(data, indent=2).encode(), private=True)

    def added(self, tenant: str = "", role: Role = Role.TENANT) -> tuple[KeyFile, Key, str]:
        """The file with a new key, and the key itself, which nobody can read from the file.

        Args:
            tenant: of a tenant's key; the others have none.
        """
        if role is Role.TENANT:
            check_name(tenant)
        elif tenant:
            raise InputError("tenant", f"the key of a {role} belongs to no tenant", tenant)
        secret = _PREFIX + secrets.token_urlsafe(32)
        owner = PUBLIC if role is Role.PUBLISHER else tenant
        key = Key(secrets.token_hex(4), owner, int(time.time()), self._digest(secret), role)
        return replace(self, keys=(*self.keys, key)), key, secret

    def granting(self, tenant: str, quota: int | None) -> KeyFile:
        """The file with this quota of a tenant in bytes; None: what the server gives by default.

        Raises:
            InputError: no key belongs to the tenant, or the quota is less than 0.
        """
        if tenant not in self.tenants:
            raise InputError("tenant", "has no key; `kvquilt keys list` shows who has", tenant)
        if quota is not None and quota < 0:
            raise InputError("quota", "must be at least 0", quota)
        others = {name: size for name, size in self.quotas.items() if name != tenant}
        return replace(self, quotas=others if quota is None else {**others, tenant: quota})

    def without(self, id: str) -> KeyFile:
        """
        Raises:
            InputError: there is no key of that id.
        """
        kept = tuple(key for key in self.keys if key.id != id)
        if len(kept) == len(self.keys):
            raise InputError("id", "there is no such key; `kvquilt keys list` shows them", id)
        return replace(self, keys=kept)

    def find(self, secret: str) -> Key | None:
        """The key that this is. Takes as long for every key, right or wrong, first or last."""
        digest, found = self._digest(secret), None
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    @property
    def tenants(self) -> tuple[str, ...]:
        """All that have documents, `PUBLIC` among them if there is a publisher."""
        return tuple(dict.fromkeys(key.tenant for key in self.keys if key.role is not Role.OPERATOR))

    def _digest(self, secret: str) -> str:
        return blake3(secret.encode(errors="replace"), key=self.salt).hexdigest()


def check_name(tenant: str) -> None:
    """Raise `InputError` unless a tenant may be called so."""
    if not tenant.strip() or len(tenant) > 128:
        raise InputError("tenant", "must be a name of at most 128 characters", tenant)
    if tenant == PUBLIC:
        raise InputError("tenant", "is what public documents belong to; --public makes their key", tenant)
    namespace(tenant)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else changes the file meanwhile, so that none of two changes at a time is lost.

    Raises:
        StoreUnavailableError: the file system refuses.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f".{path.name}.lock"), mode=0o600)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
