"""Who may ask: the tenant of a request, by its key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request

from kvquilt.server.failures import RefusalError
from kvquilt.server.keys import Keyring
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
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        tenant = keyring.file.owner(secret.strip()) if scheme.lower() == "bearer" and secret.strip() else None
        if tenant is None:
            rule = "a valid API key is needed: Authorization: Bearer KEY"
            raise RefusalError(401, "invalid_api_key", rule)
        record_of(request).tenant = tenant

    return known
