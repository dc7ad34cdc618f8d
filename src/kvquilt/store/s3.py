"""An S3 bucket as a medium: one object per segment, named as the disk tier names its files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from kvquilt.errors import InputError
from kvquilt.store.files import key_of_name, name_of_key
from kvquilt.store.medium import RefusedError, UnreachableError

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, S3Config

    from kvquilt.identity import SegmentKey
    from kvquilt.remote import Remote

_VERSION = "v1"
_LONGEST = timedelta(hours=1)  # deadlines are the tier's; the library would have its own of 30 seconds


class S3Medium:
    """The bucket that `remote` names, at Amazon or at its endpoint. Nothing is connected before the first call.

    Credentials and the region that the URL does not give are found as the AWS tools find them (``AWS_ACCESS_KEY_ID``
    and so on). What is in the bucket goes by its lifecycle rules: objects have no age of their own here.

    Raises:
        InputError: the client library is not installed, or does not take what the URL says.
    """

    name = "s3"

    def __init__(self, remote: Remote) -> None:
        try:
            from obstore.exceptions import BaseError
            from obstore.store import S3Store
        except ImportError:
            raise InputError("remote", "needs the extra s3: pip install 'kvquilt[s3]'", str(remote)) from None
        self.place = str(remote)
        config: S3Config = {}
        if remote.user:
            config["access_key_id"], config["secret_access_key"] = remote.user, remote.password
        if remote.region:
            config["region"] = remote.region
        if remote.endpoint:
            config["endpoint"] = remote.endpoint
        client: ClientConfig = {
            "connect_timeout": timedelta(seconds=remote.limits.deadline),
            "timeout": _LONGEST,
            "allow_http": remote.endpoint.startswith("http://"),
        }
        try:
            self._bucket = S3Store(
                remote.host,
                prefix=remote.path or None,
                config=config,
                client_options=client,
                retry_config={"max_retries": 0},
            )
        except BaseError:
            raise InputError("remote", "is refused by the S3 client", str(remote)) from None

    async def find(self, keys: Sequence[SegmentKey]) -> Sequence[_Object | None]:
        found = await asyncio.gather(*map(self._open, keys), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if not isinstance(each, BaseException)]

    async def write(self, key: SegmentKey, parts: Sequence[memoryview]) -> None:
        import obstore

        with _errors():
            try:
                await obstore.put_async(self._bucket, _name(key), b"".join(parts), use_multipart=False)
            except FileNotFoundError:
                raise RefusedError("no such bucket") from None

    async def remove(self, key: SegmentKey) -> bool:
        import obstore

        with _errors():
            try:
                await obstore.head_async(self._bucket, _name(key))
            except FileNotFoundError:
                return False
            await obstore.delete_async(self._bucket, _name(key))
        return True

    async def list(self, namespace: str | None) -> AsyncIterator[tuple[SegmentKey, int]]:
        import obstore

        beginning = f"{_VERSION}/{namespace}" if namespace else _VERSION
        with _errors():
            async for page in obstore.list(self._bucket, beginning):
                for each in page:
                    key = key_of_name(each["path"].removeprefix(f"{_VERSION}/"))
                    if key is not None:
                        yield key, each["size"]

    async def ping(self) -> None:
        import obstore

        with _errors():
            try:
                await obstore.head_async(self._bucket, _VERSION)
            except FileNotFoundError:  # an answer
                return

    async def close(self) -> None:
        """Nothing: connections are the library's."""

    async def _open(self, key: SegmentKey) -> _Object | None:
        import obstore

        with _errors():
            try:
                return _Object(await obstore.get_async(self._bucket, _name(key)))
            except FileNotFoundError:
                return None


@dataclass(frozen=True, slots=True)
class _Object:
    """An answer whose head is here and whose body is on its way."""

    result: GetResult

    @property
    def size(self) -> int:
        return self.result.meta["size"]

    async def read(self) -> memoryview | None:
        with _errors():
            return memoryview(await self.result.bytes_async())


def _name(key: SegmentKey) -> str:
    return f"{_VERSION}/{name_of_key(key)}"


@contextmanager
def _errors() -> Iterator[None]:
    """The library's errors as a medium's; their texts, which quote the server's answer, stay here."""
    from obstore import exceptions as errors

    try:
        yield
    except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
        raise RefusedError("not authorised") from error
    except errors.GenericError as error:  # no connection, or an answer that tells of a failure over there
        raise UnreachableError("no connection") from error
    except errors.BaseError as error:
        raise RefusedError(type(error).__name__) from error
