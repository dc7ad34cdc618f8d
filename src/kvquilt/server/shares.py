"""What each tenant may keep of compiled segments: its own quota, or the default."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvquilt.errors import InputError
from kvquilt.identity import namespace
from kvquilt.server.keyring import Keyring
from kvquilt.server.keys import KeyFile
from kvquilt.store import Quotas

_MIB = 1 << 20


@dataclass(eq=False, slots=True)
class Shares:
    """Quotas of all that have a key now, the public documents among them if somebody may publish.

    Attributes:
        default: bytes of whoever has no quota in the key file.
    """

    keyring: Keyring
    default: int
    _known: tuple[KeyFile, Quotas] | None = field(default=None, repr=False)

    def __call__(self) -> Quotas:
        """By namespace, for `Store.quote`."""
        file, known = self.keyring.file, self._known
        if known is None or known[0] is not file:  # the keyring keeps one object as long as the file is the same
            made = {namespace(tenant): file.quotas.get(tenant, self.default) for tenant in file.tenants}
            known = self._known = file, Quotas(made)
        return known[1]

    def of(self, tenant: str | None) -> int:
        return self().bytes.get(namespace(tenant), 0)

    def check(self, memory: int, disk: int) -> str:
        """What is to be said of tiers of these budgets; "" for nothing.

        Raises:
            InputError: together the quotas are more than the disk tier, so that some would not get theirs.
        """
        quotas = self()
        told = f"{len(quotas.bytes)} tenants may keep {quotas.total // _MIB} MiB together"
        if quotas.total > disk:
            rule = f"{told}, and the disk tier has {disk // _MIB} MiB; lower quotas, or raise the setting disk_bytes"
            raise InputError("tenant-quota-mib", rule, self.default // _MIB)
        if quotas.total > memory:
            return f"{told}; the memory tier has {memory // _MIB} MiB, of which each has its part in proportion"
        return ""
