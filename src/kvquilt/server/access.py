"""Who may ask: the tenant of a request by its key, and the operator for the numbers of all."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable

from starlette.requests import Request

from kvquilt.server.failures import RefusalError
from kvquilt.server.keyring import Keyring
from kvquilt.server.keys import Key, Role
from kvquilt.server.record import record_of


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; of other names than localhost nobody knows."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def guard(keyring: Keyring | None) -> Callable[[Request], Awaitable[None]]:
    """Notes the tenant of a request, or refuses it. Without keys the only tenant is None, on this machine."""

    async def known(request: Request) -> None:
        if keyring is None:
            _check_host(request)
            return
        key = _key(keyring, request)
        if key.role is Role.OPERATOR:
            raise RefusalError(403, "wrong_key", "an operator's key opens /metrics alone")
        record_of(request).tenant = key.tenant

    return known


def operator_guard(keyring: Keyring | None) -> Callable[[Request], Awaitable[None]]:
    """Refuses who is no operator, where there are keys: numbers of all tenants tell each of them of the others."""

    async def known(request: Request) -> None:
        if keyring is None:
            _check_host(request)
        elif _key(keyring, request).role is not Role.OPERATOR:
            raise RefusalError(403, "wrong_key", "with API keys, /metrics needs an operator's")

    return known


def _check_host(request: Request) -> None:
    """Refuse other names than this machine's: a page of one that resolves to it would speak as its user."""
    host = request.headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if not is_loopback(name.removeprefix("[").removesuffix("]")):
        raise RefusalError(403, "foreign_host", "without API keys only this machine's own names are answered")


def _key(keyring: Keyring, request: Request) -> Key:
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    key = keyring.file.find(secret.strip()) if scheme.lower() == "bearer" and secret.strip() else None
    if key is None:
        raise RefusalError(401, "invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY")
    return key
