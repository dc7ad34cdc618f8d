"""Valkey (or Redis) as a medium: one string per segment, ``kvquilt:v1:<namespace>:<digest>``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvquilt.errors import InputError
from kvquilt.identity import SegmentKey
from kvquilt.store.files import is_digest, is_namespace
from kvquilt.store.medium import RefusedError, UnreachableError

if TYPE_CHECKING:
    from kvquilt.remote import Remote

T = TypeVar("T")
_LARGEST = 512 << 20  # of a string, by the protocol
_PREFIX = "kvquilt:v1"
_PORT = 6379
_CONNECTIONS = 8
_PAGE = 1000


class ValkeyMedium:
    """The database that `remote` names. Nothing is connected before the first call.

    Raises:
        InputError: the client library is not installed, or `max_bytes` is more than a value can have.
    """

    name = "valkey"

    def __init__(self, remote: Remote) -> None:
        try:
            from valkey.asyncio import BlockingConnectionPool, Connection, SSLConnection, Valkey
        except ImportError:
            raise InputError("remote", "needs the extra valkey: pip install 'kvquilt[valkey]'", str(remote)) from None
        if remote.limits.max_bytes > _LARGEST:
            raise InputError("remote", "max_bytes must be at most 512 MiB, the longest value of a server")
        self.place = str(remote)
        self._ttl = remote.ttl
        secured: dict[str, Any] = {"connection_class": SSLConnection, "ssl_check_hostname": True}
        pool = BlockingConnectionPool(
            max_connections=_CONNECTIONS,
            timeout=None,  # deadlines are the tier's: whole calls, not single reads
            host=remote.host,
            port=remote.port or _PORT,
            db=int(remote.path or 0),
            username=remote.user or None,
            password=remote.password or None,
            socket_timeout=None,
            **(secured if remote.scheme == "valkeys" else {"connection_class": Connection}),
        )
        self._client: Any = Valkey.from_pool(pool)

    async def find(self, keys: Sequence[SegmentKey]) -> Sequence[_Value | None]:
        with _errors():
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.strlen(_name(key))
            sizes = [_as(int, each) for each in await pipe.execute()]
        return [_Value(self, key, size) if size > 0 else None for key, size in zip(keys, sizes, strict=True)]

    async def read(self, key: SegmentKey) -> memoryview | None:
        with _errors():
            content = await self._client.get(_name(key))
        return None if content is None else memoryview(_as(bytes, content))

    async def write(self, key: SegmentKey, parts: Sequence[memoryview]) -> None:
        with _errors():
            await self._client.set(_name(key), b"".join(parts), ex=self._ttl)

    async def remove(self, key: SegmentKey) -> bool:
        with _errors():
            return _as(int, await self._client.unlink(_name(key))) > 0

    async def list(self, namespace: str | None) -> AsyncIterator[tuple[SegmentKey, int]]:
        at: int | None = None
        while at != 0:
            with _errors():
                at, names = await self._client.scan(at or 0, f"{_PREFIX}:{namespace or '*'}:*", _PAGE)
                keys = [key for key in map(_key, names) if key is not None]
                found = await self.find(keys) if keys else []
            for each in found:
                if each is not None:
                    yield each.key, each.size

    async def ping(self) -> None:
        with _errors():
            await self._client.ping()

    async def close(self) -> None:
        with _errors():
            await self._client.aclose(close_connection_pool=True)


@dataclass(frozen=True, slots=True)
class _Value:
    medium: ValkeyMedium
    key: SegmentKey
    size: int

    async def read(self) -> memoryview | None:
        return await self.medium.read(self.key)


def _name(key: SegmentKey) -> str:
    return f"{_PREFIX}:{key.namespace}:{key.digest}"


def _key(name: bytes) -> SegmentKey | None:
    """The key of one of our names; None for any other, of whatever bytes."""
    namespace, _, digest = name.decode(errors="replace").removeprefix(f"{_PREFIX}:").partition(":")
    return SegmentKey(namespace, digest) if is_namespace(namespace) and is_digest(digest) else None


def _as(kind: type[T], reply: object) -> T:
    if not isinstance(reply, kind):
        raise RefusedError("its reply is none to what was asked")
    return reply


@contextmanager
def _errors() -> Iterator[None]:
    """The library's errors as a medium's; their texts, which may quote what was sent, stay here."""
    from valkey import exceptions as errors

    try:
        yield
    except errors.OutOfMemoryError as error:
        raise RefusedError("out of memory", full=True) from error
    except (errors.AuthenticationError, errors.AuthorizationError) as error:
        raise RefusedError("not authorised") from error
    except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
        raise UnreachableError("no connection") from error
    except (errors.ValkeyError, TypeError, ValueError) as error:  # the library, too, trips over what is no reply
        raise RefusedError(type(error).__name__) from error
