"""Who may ask: the tenant of a request by its key, and the operator for the numbers of all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request

from kvquilt.server.failures import RefusalError
from kvquilt.server.keyring import Keyring
from kvquilt.server.keys import Key, Role
from kvquilt.server.record import record_of

LOCAL = frozenset(("localhost", "127.0.0.1", "[::1]", "::1"))


def guard(keyring: Keyring | None) -> Callable[[Request], Awaitable[None]]:
    """Notes the tenant of a request, or refuses it. Without keys the only tenant is None, on this machine."""

    async def known(request: Request) -> None:
        if keyring is None:
            # a page of a foreign name that resolves to this machine would speak as its user
            host = request.headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name.lower() not in LOCAL:
                raise RefusalError(403, "foreign_host", "without API keys only this machine's own names are answered")
            return
        key = _key(keyring, request)
        if key.role is Role.OPERATOR:
            raise RefusalError(403, "wrong_key", "an operator's key opens /metrics alone")
        record_of(request).tenant = key.tenant

    return known


def operator_guard(keyring: Keyring | None) -> Callable[[Request], Awaitable[None]]:
    """Refuses who is no operator, where there are keys: numbers of all tenants tell each of them of the others."""

    async def known(request: Request) -> None:
        if keyring is not None and _key(keyring, request).role is not Role.OPERATOR:
            raise RefusalError(403, "wrong_key", "with API keys, /metrics needs an operator's")

    return known


def _key(keyring: Keyring, request: Request) -> Key:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    key = keyring.file.find(secret.strip()) if scheme.lower() == "bearer" and secret.strip() else None
    if key is None:
        raise RefusalError(401, "invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY")
    return key
