"""URLs of the remote tier: what they say, what they refuse, and that they keep their secrets."""

from __future__ import annotations

import pytest

from kvquilt.errors import InputError
from kvquilt.remote import Limits, Remote


def test_a_url_names_server_database_and_limits() -> None:
    remote = Remote.parse("redis://me:p%40ss@host:7000/3?ttl=60&deadline=0.5&queue_bytes=1GiB&failures=2")
    assert (remote.scheme, remote.host, remote.port, remote.path) == ("valkey", "host", 7000, "3")
    assert (remote.user, remote.password, remote.ttl) == ("me", "p@ss", 60)
    assert remote.limits == Limits(deadline=0.5, queue_bytes=1 << 30, failures=2)
    assert Remote.parse("rediss://host").scheme == "valkeys"
    assert Remote.parse("valkey://[::1]:7000").host == "::1"
    assert str(Remote.parse("valkey://[::1]:7000")) == "valkey://[::1]:7000"


def test_a_url_names_bucket_prefix_and_endpoint() -> None:
    remote = Remote.parse("s3://bucket/a/b/?endpoint=http://127.0.0.1:9000/&region=eu")
    assert (remote.scheme, remote.host, remote.path) == ("s3", "bucket", "a/b")
    assert (remote.endpoint, remote.region, remote.limits) == ("http://127.0.0.1:9000", "eu", Limits())


@pytest.mark.parametrize("url", ["valkey://me:geheim@h:7/1?ttl=9&deadline=0.5", "s3://id:geheim@b/p?region=eu"])
def test_what_is_printed_has_no_secret_and_says_the_rest(url: str) -> None:
    remote = Remote.parse(url)
    assert str(remote) == url.replace("geheim", "***")
    assert repr(remote) == f"Remote({str(remote)!r})"
    assert "geheim" not in f"{remote} {remote!r} {[remote]} {Remote.parse('valkey://h').with_password('geheim')}"


def test_a_password_beside_the_url_fills_in_where_it_has_none() -> None:
    assert Remote.parse("valkey://h").with_password("a").password == "a"
    assert Remote.parse("valkey://:b@h").with_password("a").password == "b"


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("http://geheim@host", "must be valkey://"),
        ("valkey:geheim", "must be valkey://"),
        ("valkey://:geheim@/0", "must be valkey://"),
        ("valkey://:geheim@host:port/0", "must be valkey://"),
        ("valkey://:geheim@[::1/0", "must be valkey://"),
        ("valkey://:geheim@host/0#x", "must be valkey://"),
        ("valkey://:geheim@host/db", "number of a database"),
        ("s3://a:geheim@bucket:80/x", "a bucket has no port"),
        ("valkey://:geheim@host?tll=3", "no such option for valkey; did you mean 'ttl'"),
        ("s3://a:geheim@bucket?ttl=3", "no such option for s3"),
        ("valkey://:geheim@host?endpoint=http://x", "no such option for valkey"),
        ("valkey://:geheim@host?ttl=-1", "ttl must be a whole number from 1"),
        ("valkey://:geheim@host?deadline=0", "deadline must be a number of seconds above 0"),
        ("valkey://:geheim@host?deadline=inf", "deadline must be a number of seconds above 0"),
        ("valkey://:geheim@host?max_bytes=lots", "max_bytes must be a size above 0"),
        ("valkey://:geheim@host?max_bytes=", "max_bytes must be a size above 0"),
        ("s3://bucket?endpoint=http://a:geheim@host", "endpoint must be http://HOST:PORT"),
        ("s3://bucket?endpoint=geheim", "endpoint must be http://HOST:PORT"),
    ],
)
def test_a_wrong_url_names_the_rule_and_no_secret(url: str, rule: str) -> None:
    with pytest.raises(InputError) as caught:
        Remote.parse(url)
    assert caught.value.field == "remote"
    assert rule in str(caught.value)
    assert "geheim" not in str(caught.value)
