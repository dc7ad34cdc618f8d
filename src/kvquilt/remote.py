"""Where the remote tier of the store is: one URL with its options, whose secrets nobody prints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from pydantic import ByteSize, TypeAdapter, ValidationError

from kvquilt.errors import InputError, nearest

_MIB = 1 << 20
_SERVERS = {"valkey": "valkey", "valkeys": "valkeys", "redis": "valkey", "rediss": "valkeys"}
_Read = Callable[[str], float | int | str | None]
_FORMS = "valkey://HOST:PORT/DB, valkeys:// for TLS, or s3://BUCKET/PREFIX"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the remote tier may cost. Sizes in bytes, times in seconds, `rate` in bytes per second.

    Attributes:
        deadline: for a connection, a look-up, a removal; a transfer may take as long again and its bytes at `rate`.
        write_deadline: the same for a write, which nobody waits for.
        rate: what transfers slower than this counts as dead.
        pause: between two questions to a server that did not answer, whether it is back.
        failures: so many in a row, and it is left alone for a while; one that used up its deadline is enough.
        max_bytes: longer values are neither written nor read.
        queue_bytes: what may wait to be written.
        flush: how long closing waits for what is not yet written.
    """

    deadline: float = 0.25
    write_deadline: float = 5.0
    rate: int = 32 * _MIB
    pause: float = 5.0
    failures: int = 3
    max_bytes: int = 256 * _MIB
    queue_bytes: int = 256 * _MIB
    flush: float = 10.0


@dataclass(frozen=True, slots=True, repr=False)
class Remote:
    """A parsed URL.

    Attributes:
        scheme: ``valkey``, ``valkeys`` (TLS) or ``s3``.
        host: the server, or the bucket.
        path: the number of the database, or what object names begin with; without slashes at its ends.
        user, password: of the server, or access key and secret of the bucket; "" where others are to be found.
        ttl: seconds that Valkey keeps a value after it was written; None leaves that to its policy.
        endpoint, region: of S3 that is not Amazon's.
    """

    scheme: str
    host: str
    port: int | None = None
    path: str = ""
    user: str = ""
    password: str = ""
    ttl: int | None = None
    endpoint: str = ""
    region: str = ""
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def parse(cls, url: str) -> Remote:
        """Read ``valkey://[USER:PASSWORD@]HOST[:PORT][/DB][?ttl=..]`` or ``s3://BUCKET[/PREFIX][?endpoint=..]``.

        Every field of `Limits` is an option too: ``?deadline=0.5&queue_bytes=1GiB``.

        Raises:
            InputError: of the field ``remote``; secrets never stand in it.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:  # its message may hold the password
            raise InputError("remote", f"must be {_FORMS}") from None
        scheme = "s3" if parts.scheme == "s3" else _SERVERS.get(parts.scheme, "")
        if not scheme or not host or parts.fragment:
            raise InputError("remote", f"must be {_FORMS}")
        user, password, path = unquote(parts.username or ""), unquote(parts.password or ""), parts.path.strip("/")
        if scheme != "s3" and path and not path.isdigit():
            raise InputError("remote", "the path is the number of a database", path)
        if scheme == "s3" and port is not None:
            raise InputError("remote", "a bucket has no port; write ?endpoint=http://HOST:PORT")
        own, limits = _options(scheme, parts.query)
        return cls(scheme, host, port, path, user, password, **own, limits=limits)  # type: ignore[arg-type]

    def with_password(self, password: str) -> Remote:
        """The same with this password, unless the URL has one."""
        return self if self.password else replace(self, password=password)

    def __str__(self) -> str:
        """The URL without its password and without options that are as by default."""
        secret = f"{self.user}{':***' if self.password else ''}@" if self.user or self.password else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port, path = f":{self.port}" if self.port else "", f"/{self.path}" if self.path else ""
        told = {name: getattr(self, name) for name in ("ttl", "endpoint", "region") if getattr(self, name)}
        told |= {f.name: value for f in fields(Limits) if (value := getattr(self.limits, f.name)) != f.default}
        return f"{self.scheme}://{secret}{host}{port}{path}" + (f"?{urlencode(told, safe=':/')}" if told else "")

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"


def _options(scheme: str, query: str) -> tuple[dict[str, object], Limits]:
    """What stands behind the question mark: what the scheme has of its own, and limits."""
    kinds: dict[str, _Read] = {f.name: _seconds for f in fields(Limits)}
    kinds |= dict.fromkeys(("rate", "max_bytes", "queue_bytes"), _bytes) | {"failures": _count}
    own: dict[str, _Read] = {"endpoint": _address, "region": str} if scheme == "s3" else {"ttl": _count}
    given: dict[str, object] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        read = own.get(name) or kinds.get(name)
        if read is None:
            raise InputError("remote", f"no such option for {scheme}{nearest(name, [*own, *kinds])}", name)
        value = read(text)
        if value is None:
            raise InputError("remote", f"{name} must be {_RULES[read]}")
        given[name] = value
    limits = Limits(**{name: value for name, value in given.items() if name in kinds})  # type: ignore[arg-type]
    return {name: value for name, value in given.items() if name in own}, limits


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 and math.isfinite(value) else None


def _bytes(text: str) -> int | None:
    try:
        value = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        return None
    return value if value > 0 else None


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _address(text: str) -> str | None:
    """An endpoint; who it is asked for is in the URL itself."""
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        return None
    return text.rstrip("/") if sound and not parts.query else None


_RULES: dict[_Read, str] = {
    _seconds: "a number of seconds above 0",
    _bytes: "a size above 0, such as 64MiB",
    _count: "a whole number from 1",
    _address: "http://HOST:PORT or https://HOST, without a user",
}
