"""The Valkey tier on a real server that is killed, stopped, full, slow, locked or has other bytes than it was given."""

from __future__ import annotations

import logging
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvquilt.errors import InputError, StoreUnavailableError
from kvquilt.identity import SegmentKey, namespace
from kvquilt.remote import Remote
from kvquilt.segment import CompiledSegment
from kvquilt.store import Failure, FailureReason, Hit, Layout, Miss, MissReason, RemoteTier, Store, Stored
from kvquilt.store.format import encode
from kvquilt.store.remote import open_remote
from tests.store import valkey_server
from tests.store.proxy import proxy
from tests.store.segments import key_of, make, same, wanted
from tests.store.server import saying
from tests.store.valkey_server import Server
from tests.waiting import until

pytestmark = pytest.mark.skipif(valkey_server.FOUND is None, reason=valkey_server.WHY_NOT)
PATIENT = "deadline=20&write_deadline=20"
ABSENT, TIMEOUT = Miss(MissReason.ABSENT), Miss(MissReason.TIMEOUT)
NOT_ASKED, UNREACHABLE = Miss(MissReason.NOT_ASKED), Miss(MissReason.UNREACHABLE)
OpenTier = Callable[..., RemoteTier]


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with valkey_server.running() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.empty()
    return shared


@pytest.fixture
def open_tier(server: Server) -> Iterator[OpenTier]:
    """Opens a tier on the server, or on a port; all are closed again."""
    opened: list[RemoteTier] = []

    def open_it(options: str = PATIENT, port: int | None = None, secret: str = "") -> RemoteTier:
        opened.append(open_remote(f"valkey://{secret}127.0.0.1:{port or server.port}/0?flush=20&{options}"))
        return opened[-1]

    yield open_it
    for tier in opened:
        tier.check_integrity()
        tier.close()


def write(tier: RemoteTier, *segments: CompiledSegment) -> None:
    for segment in segments:
        assert isinstance(tier.put(key_of(segment), segment), Stored)
    assert tier.flush()
    assert tier.stats().failures == {}


def read(tier: RemoteTier, number: int) -> Hit | Miss:
    answer = tier.get(*wanted(make(number)))
    assert isinstance(answer, Miss) or same(answer.segment, make(number)), "never anything but the right bytes"
    return answer


def name(key: SegmentKey) -> str:
    return f"kvquilt:v1:{key.namespace}:{key.digest}"


def content(segment: CompiledSegment, key: SegmentKey | None = None) -> bytes:
    return b"".join(encode(key or key_of(segment), segment))


def test_the_value_is_the_file_and_the_key_tells_nothing(server: Server, open_tier: OpenTier) -> None:
    tier = open_tier()
    write(tier, make(1))
    assert server.say("GET", name(key_of(make(1)))) == content(make(1))
    listed = server.say("KEYS", "*").split(b"\r\n")[2::2]
    assert len(listed) == 1
    assert re.fullmatch(rb"kvquilt:v1:[0-9a-f]{32}:[0-9a-f]{64}", listed[0])


def test_a_server_that_is_killed_and_comes_back_empty(server: Server, open_tier: OpenTier) -> None:
    tier = open_tier(f"{PATIENT}&pause=0.02")
    write(tier, make(1))
    server.kill()
    try:
        assert [read(tier, 1) for _ in range(3)] == [UNREACHABLE] * 3
        assert tier.stats().breaker != "closed"
        assert read(tier, 1) == NOT_ASKED
        assert tier.put(key_of(make(2)), make(2)) == Failure(FailureReason.NOT_ASKED)
    finally:
        server.start()
    until(lambda: tier.stats().breaker == "closed")
    assert read(tier, 1) == ABSENT, "nobody counts on what was put"
    assert isinstance(tier.put(key_of(make(1)), make(1)), Stored)
    assert tier.flush()
    assert isinstance(read(tier, 1), Hit)
    stats = tier.stats()
    assert (stats.hits, stats.failures) == (1, {"not_asked": 1})
    assert stats.misses == {"unreachable": 3, "not_asked": 1, "absent": 1}


def test_a_stopped_server_costs_one_deadline_whatever_is_asked(server: Server, open_tier: OpenTier) -> None:
    tier = open_tier("deadline=0.3&pause=0.02")
    write(tier, make(1), make(2))
    with server.stopped():
        before = time.monotonic()
        answers = tier.get_many([(*wanted(make(number)), None) for number in (1, 2, 3)])
        first = time.monotonic() - before
        assert answers == [TIMEOUT] * 3
        assert first >= 0.3
        before = time.monotonic()
        for _ in range(50):
            assert read(tier, 1) == NOT_ASKED
        assert not tier.contains(key_of(make(1)))
        assert not tier.remove(key_of(make(1)))
        assert time.monotonic() - before < 0.3, "52 calls cost less than one deadline"
    until(lambda: isinstance(read(tier, 1), Hit))
    assert tier.stats().failures == {"not_asked": 1}, "the removal was not done, and that is counted"


def test_a_server_that_was_never_there(open_tier: OpenTier, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kvquilt"):
        tier = open_tier(f"{PATIENT}&pause=0.01", port=1, secret="me:geheim@")
        assert [read(tier, 1) for _ in range(3)] == [UNREACHABLE] * 3
        assert not tier.answers()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, "said once, not at every request"
    assert "remote tier valkey://me:***@127.0.0.1:1/0" in warnings[0]
    assert "geheim" not in caplog.text
    for listing in (tier.keys, tier.rows, tier.verify):
        with pytest.raises(StoreUnavailableError, match="no connection") as caught:
            list(listing())  # type: ignore[call-overload]
        assert "geheim" not in str(caught.value)


def flipped(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]


DAMAGE: dict[str, tuple[Callable[[], bytes], MissReason]] = {
    "a bit of the keys": (lambda: flipped(content(make(1)), -200), MissReason.CORRUPT),
    "a bit of the ids": (lambda: flipped(content(make(1)), -1), MissReason.CORRUPT),
    "a bit of the start": (lambda: content(make(1)).replace(b'"start":"1"', b'"start":"2"'), MissReason.CORRUPT),
    "half of it": (lambda: content(make(1))[:700], MissReason.TRUNCATED),
    "four bytes": (lambda: b"abcd", MissReason.TRUNCATED),
    "more than it": (lambda: content(make(1)) + b"x", MissReason.CORRUPT),
    "no header": (lambda: b"\xff" * 999, MissReason.CORRUPT),
    "another segment": (lambda: content(make(2)), MissReason.SWAPPED),
    "another tenant's": (lambda: content(make(1), key_of(make(1), "b")), MissReason.SWAPPED),
    "another version": (lambda: content(make(1)).replace(b'"version":"1"', b'"version":"2"'), MissReason.WRONG_VERSION),
}


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_what_is_not_what_was_put_is_a_miss_with_its_reason_and_removed(
    server: Server, open_tier: OpenTier, kind: str
) -> None:
    damaged, reason = DAMAGE[kind]
    tier = open_tier()
    write(tier, make(1), make(3))
    assert server.say("SET", name(key_of(make(1))), damaged()) == b"+OK\r\n"
    report = tier.verify()
    assert (report.checked, report.damaged, report.removed) == (2, ((key_of(make(1)), reason),), 0)
    assert read(tier, 1) == Miss(reason)
    assert tier.flush()
    assert server.say("EXISTS", name(key_of(make(1)))) == b":0\r\n"
    assert tier.stats().misses == {reason.value: 1}
    assert tier.stats().breaker == "closed"
    assert isinstance(read(tier, 3), Hit)
    write(tier, make(1))
    assert isinstance(read(tier, 1), Hit)


def test_what_is_sound_for_somebody_else_stays(server: Server, open_tier: OpenTier) -> None:
    tier = open_tier()
    write(tier, make(1))
    narrow = Layout.of(make(1, layers=1))
    assert tier.get(*wanted(make(1)), narrow) == Miss(MissReason.WRONG_SHAPE)
    assert tier.get(key_of(make(1)), make(2).ids) == Miss(MissReason.COLLISION)
    assert tier.flush()
    assert isinstance(read(tier, 1), Hit)


def test_verify_with_repair_removes_what_is_damaged_and_nothing_else(server: Server, open_tier: OpenTier) -> None:
    tier = open_tier()
    write(tier, *map(make, range(1, 6)))
    for number in (2, 4):
        server.say("SET", name(key_of(make(number))), b"damaged!")
    server.say("SET", "kvquilt:v1:not-a-namespace:x", "somebody else's")
    server.say("SET", "other", "somebody else's")
    report = tier.verify(repair=True)
    assert (report.checked, report.removed) == (5, 2)
    assert {key for key, _ in report.damaged} == {key_of(make(2)), key_of(make(4))}
    assert set(tier.keys()) == {key_of(make(number)) for number in (1, 3, 5)}
    assert server.say("DBSIZE") == b":5\r\n"


def test_a_full_server_refuses_and_is_still_read(server: Server, open_tier: OpenTier) -> None:
    tier = open_tier()
    write(tier, make(1))
    used = re.search(rb"used_memory:(\d+)", server.say("INFO", "memory"))
    assert used is not None
    server.say("CONFIG", "SET", "maxmemory", str(int(used[1]) // 2))
    try:
        for number in range(2, 8):
            assert isinstance(tier.put(key_of(make(number)), make(number)), Stored)
        assert tier.flush()
        assert tier.stats().failures == {"no_space": 6}
        assert tier.stats().breaker == "closed", "an answer is an answer"
        assert isinstance(read(tier, 1), Hit)
        assert read(tier, 2) == ABSENT
    finally:
        server.say("CONFIG", "SET", "maxmemory", "0")


def test_a_server_that_evicts_as_it_likes_is_believed(server: Server, open_tier: OpenTier) -> None:
    tier = open_tier()
    write(tier, make(1))
    used = re.search(rb"used_memory:(\d+)", server.say("INFO", "memory"))
    assert used is not None
    server.say("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    server.say("CONFIG", "SET", "maxmemory", str(int(used[1]) + 200_000))
    try:
        write(tier, *(make(number, tokens=100) for number in range(1, 40)))
        there = [isinstance(tier.get(*wanted(make(number, tokens=100))), Hit) for number in range(1, 40)]
        assert 0 < sum(there) < 39
        assert len(list(tier.keys())) <= sum(there) + 1
        assert tier.stats().misses == {"absent": 39 - sum(there)}
    finally:
        server.say("CONFIG", "SET", "maxmemory", "0")
        server.say("CONFIG", "SET", "maxmemory-policy", "noeviction")


def test_what_came_in_time_is_a_hit_though_the_rest_did_not(server: Server, open_tier: OpenTier) -> None:
    write(open_tier(), make(1), make(2, tokens=4000))
    with proxy(server.port) as between:
        tier = open_tier("deadline=2&pause=0.02", port=between.port)
        assert isinstance(read(tier, 1), Hit)
        between.allow(20_000)
        large = make(2, tokens=4000)
        answers = tier.get_many([(*wanted(make(1)), None), (*wanted(large), None), (*wanted(make(3)), None)])
        assert isinstance(answers[0], Hit)
        assert answers[1:] == [TIMEOUT, ABSENT]
        assert tier.stats().breaker != "closed"
        between.allow(None)
        until(lambda: tier.stats().breaker == "closed")
        for number in range(4):
            assert isinstance(read(tier, 1), Hit), number
            assert isinstance(tier.get(*wanted(large)), Hit), "no answer of a given-up call is taken for another's"


def test_an_answer_in_drops_does_not_stretch_the_deadline(server: Server, open_tier: OpenTier) -> None:
    write(open_tier(), make(1, tokens=4000))
    with proxy(server.port) as between:
        tier = open_tier("deadline=0.5&rate=100MiB&pause=0.02", port=between.port)
        until(tier.answers)
        between.pace = 0.01
        before = time.monotonic()
        assert tier.get(*wanted(make(1, tokens=4000))) == TIMEOUT
        assert 0.5 <= time.monotonic() - before < 20, "at that pace it would take two minutes"
        between.pace = None


def test_a_password_opens_and_a_wrong_one_is_a_counted_miss(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture
) -> None:
    with valkey_server.running("--requirepass", "geheim") as locked:
        tier = open_tier(port=locked.port, secret=":geheim@")
        write(tier, make(1))
        assert isinstance(read(tier, 1), Hit)
        with caplog.at_level(logging.DEBUG):
            wrong = open_tier(port=locked.port, secret=":falsch@")
            none = open_tier(port=locked.port)
            for each in (wrong, none):
                assert [read(each, 1) for _ in range(3)] == [Miss(MissReason.UNREADABLE)] * 3
                assert read(each, 1) == NOT_ASKED
                with pytest.raises(StoreUnavailableError, match="not authorised"):
                    each.verify()
        assert "falsch" not in caplog.text + repr(wrong.stats())


NONSENSE = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"$5\r\nab\r\n\r\n",
    b"$99999999999\r\n",
    b"*-5\r\n",
    b"*1\r\n:4\r\n",
    b":notanumber\r\n",
    b":-4\r\n",
    b":1300\r\n",  # the size of a value that is a number
    b":99999999999999999999999999\r\n",
    b"+OK\r\n",
    b"_\r\n",
    b"-LOADING the data\r\n",
    b"-MOVED 1 127.0.0.1:1\r\n",
    b"\0" * 50,
]


@pytest.mark.parametrize("reply", NONSENSE)
def test_a_server_that_talks_nonsense_is_a_miss(open_tier: OpenTier, reply: bytes) -> None:
    with saying(reply) as port:
        tier = open_tier("deadline=0.3&write_deadline=0.3&pause=60", port=port)
        assert all(isinstance(read(tier, 1), Miss) for _ in range(3))
        tier.put(key_of(make(1)), make(1))
        assert tier.flush()
        tier.contains(key_of(make(1)))
        tier.remove(key_of(make(1)))
        tier.close()


def test_calls_that_were_given_up_use_up_nothing(
    server: Server, open_tier: OpenTier, caplog: pytest.LogCaptureFixture
) -> None:
    patient = open_tier()
    write(patient, make(1), make(2))
    tier = open_tier("deadline=0.05&pause=0.01")
    for _ in range(12):  # more than there are connections
        with server.stopped():
            tier.get_many([(*wanted(make(number)), None) for number in (1, 2, 3)])
        until(lambda: tier.stats().breaker == "closed")
    until(lambda: isinstance(read(tier, 1), Hit) and isinstance(read(tier, 2), Hit))
    assert tier.stats().misses["timeout"] >= 12
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1, "said once"


def test_tls_checks_whose_certificate_it_is() -> None:
    tier = open_remote("valkeys://host")
    connection = tier._medium._client.connection_pool.make_connection()  # type: ignore[attr-defined]
    context = connection.ssl_context.get()
    assert context.check_hostname
    assert context.verify_mode == ssl.CERT_REQUIRED
    tier.close()


def test_a_value_may_live_for_a_while_only(server: Server, open_tier: OpenTier) -> None:
    write(open_tier(f"{PATIENT}&ttl=500"), make(1))
    write(open_tier(), make(2))
    assert 0 < int(server.say("TTL", name(key_of(make(1))))[1:]) <= 500
    assert server.say("TTL", name(key_of(make(2)))) == b":-1\r\n"


def test_values_that_are_too_long_are_neither_written_nor_read(server: Server, open_tier: OpenTier) -> None:
    small = open_tier(f"{PATIENT}&max_bytes=2000")
    large = make(1, tokens=30)
    assert small.put(key_of(large), large) == Failure(FailureReason.TOO_LARGE)
    write(open_tier(), large)
    assert small.get(*wanted(large)) == Miss(MissReason.TOO_LARGE)
    assert small.stats().failures == {"too_large": 1}
    assert isinstance(open_tier().get(*wanted(large)), Hit), "it is sound, so it stays"
    with pytest.raises(InputError, match="at most 512 MiB"):
        open_tier("max_bytes=1GiB")


def test_writes_that_find_no_room_to_wait_are_dropped_and_counted(server: Server, open_tier: OpenTier) -> None:
    size = len(content(make(1)))
    tier = open_tier(f"{PATIENT}&queue_bytes={2 * size}")
    assert tier.answers()
    with server.stopped():
        assert isinstance(tier.put(key_of(make(1)), make(1)), Stored)
        until(lambda: tier._outbox._sending is not None)
        outcomes = [tier.put(key_of(make(number)), make(number)) for number in range(2, 6)]
        assert [isinstance(outcome, Stored) for outcome in outcomes] == [True, True, False, False]
        assert outcomes[2] == Failure(FailureReason.QUEUE_FULL)
        assert tier.stats().waiting == 3
    assert tier.flush()
    assert tier.stats().waiting == 0
    assert [isinstance(read(tier, number), Hit) for number in range(1, 6)] == [True, True, True, False, False]


def test_closing_waits_for_its_deadline_and_counts_what_is_left(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_remote(f"{server.url}?{PATIENT}&flush=0.2")
    assert tier.answers()
    with server.stopped():
        for number in (1, 2, 3):
            tier.put(key_of(make(number)), make(number))
        before = time.monotonic()
        tier.close()
        assert 0.2 <= time.monotonic() - before < 10
    assert tier.stats().failures["unfinished"] == 2
    assert "closed with 2 segments unwritten" in caplog.text
    assert read(tier, 1) == UNREACHABLE, "a closed tier has nothing and breaks nothing"
    tier.close()


def test_what_was_removed_does_not_come_back_by_a_late_write(server: Server, open_tier: OpenTier) -> None:
    tier = open_tier()
    for number in range(1, 30):
        tier.put(key_of(make(number)), make(number))
        tier.remove(key_of(make(number)))
    assert tier.flush()
    assert server.say("DBSIZE") == b":0\r\n"


class Compiler:
    def __init__(self) -> None:
        self.compiled: list[int] = []

    def __call__(self, missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        for at in missing:
            self.compiled.append(at + 1)
            yield at, make(at + 1)


def test_a_second_machine_finds_what_the_first_compiled(server: Server, tmp_path: Path) -> None:
    pairs = [wanted(make(number)) for number in (1, 2, 3)]
    compiler = Compiler()
    with Store.open(tmp_path / "one", 1 << 20, remote=f"{server.url}?{PATIENT}") as one, one.fetch(pairs, compiler):
        pass
    assert compiler.compiled == [1, 2, 3]
    server.say("DEL", name(key_of(make(2))))
    with Store.open(tmp_path / "two", 1 << 20, remote=f"{server.url}?{PATIENT}") as two:
        with two.fetch(pairs, compiler) as held:
            assert [each.tier for each in held] == ["valkey", "compiled", "valkey"]
            assert [each.bytes_read for each in held] == [make(1).nbytes, 0, make(3).nbytes]
            assert all(same(each.segment, make(number)) for each, number in zip(held, (1, 2, 3), strict=True))
        assert two.keeps(key_of(make(1))), "a hit is kept nearer by"
        two.clear_memory()
        with two.fetch(pairs, compiler) as held:
            assert [each.tier for each in held] == ["disk"] * 3
        two.check_integrity()
        assert {row.key for row in two.ls()} == {key for key, _ in pairs}
    assert compiler.compiled == [1, 2, 3, 2]


def test_without_its_server_a_store_does_what_it_did_without_one(server: Server, tmp_path: Path) -> None:
    with Store.open(tmp_path, 1 << 20, remote="valkey://127.0.0.1:1/0?pause=60") as store:
        compiler = Compiler()
        assert store.disk is not None
        for _ in range(4):
            with store.fetch([wanted(make(1))], compiler) as held:
                assert same(held[0].segment, make(1))
        assert compiler.compiled == [1]
        assert not store.keeps(key_of(make(2)))
        store.clear_memory()
        store.disk.files.path(key_of(make(1))).write_bytes(b"damaged!")
        with store.fetch([wanted(make(1)), wanted(make(2))]) as held:
            assert [each.reason for each in held] == ["corrupt", "unreachable"], "damage says more than silence"
        assert store.verify().unread == ("valkey",)
        store.write_note(namespace(None), "note", {})
        with pytest.raises(StoreUnavailableError, match="no connection"):
            store.rm(namespace=namespace(None))
        assert store.ls() == []
        assert store.read_note(namespace(None), "note") is None
        store.check_integrity()


def test_rm_reaches_the_server(server: Server, tmp_path: Path) -> None:
    with Store.open(tmp_path, 1 << 20, remote=f"{server.url}?{PATIENT}") as store:
        for tenant in ("a", "b"):
            for number in (1, 2):
                store.put(key_of(make(number), tenant), make(number))
        assert store.flush()
        with Store.open(None, 0, remote=f"{server.url}?{PATIENT}") as elsewhere:
            assert elsewhere.rm(namespace=namespace("a")) == 2
            assert elsewhere.rm(key=key_of(make(1), "b")) == 1
        assert server.say("DBSIZE") == b":1\r\n"
        assert store.rm(everything=True) == 4
        assert server.say("DBSIZE") == b":0\r\n"


def test_a_collision_of_versions_is_told_by_the_store(server: Server) -> None:
    with closing(Store.open(None, 0, remote=f"{server.url}?{PATIENT}")) as store:
        server.say("SET", name(key_of(make(1))), DAMAGE["another version"][0]())
        with store.fetch([wanted(make(1))], Compiler()) as held:
            assert (held[0].tier, held[0].reason) == ("compiled", "wrong_version")
        assert store.flush()
        with store.fetch([wanted(make(1))]) as held:
            assert held[0].tier == "valkey", "the compiled one was put in its place"


def test_without_the_client_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "valkey.asyncio", None)
    with pytest.raises(InputError, match=r"pip install 'kvquilt\[valkey\]'") as caught:
        Store.open(None, 0, remote=Remote.parse("valkey://:geheim@host"))
    assert "geheim" not in str(caught.value)
