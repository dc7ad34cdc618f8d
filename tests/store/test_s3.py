"""The S3 tier on a real HTTP server that is killed, stopped, slow, or holds other bytes than it was given."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvquilt.errors import InputError, StoreUnavailableError
from kvquilt.identity import SegmentKey, namespace
from kvquilt.remote import Remote
from kvquilt.segment import CompiledSegment
from kvquilt.store import DiskTier, Failure, FailureReason, Hit, Miss, MissReason, RemoteTier, Store, Stored
from kvquilt.store.format import encode
from kvquilt.store.remote import open_remote
from tests.store import s3_server
from tests.store.proxy import proxy
from tests.store.s3_server import BUCKET, Server
from tests.store.segments import key_of, make, same, wanted
from tests.store.server import saying
from tests.waiting import until

pytestmark = pytest.mark.skipif(not s3_server.FOUND, reason=s3_server.WHY_NOT)
PATIENT = "deadline=20&write_deadline=20"
ABSENT, TIMEOUT = Miss(MissReason.ABSENT), Miss(MissReason.TIMEOUT)
NOT_ASKED, UNREACHABLE = Miss(MissReason.NOT_ASKED), Miss(MissReason.UNREACHABLE)
OpenTier = Callable[..., RemoteTier]


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with s3_server.running() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.empty()
    return shared


@pytest.fixture
def open_tier(server: Server) -> Iterator[OpenTier]:
    """Opens a tier on the server, or on a port; all are closed again."""
    opened: list[RemoteTier] = []

    def open_it(options: str = PATIENT, port: int | None = None) -> RemoteTier:
        url = server.url.replace(f":{server.port}", f":{port or server.port}")
        opened.append(open_remote(f"{url}&flush=20&{options}"))
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


def path(key: SegmentKey) -> str:
    return f"{BUCKET}/some/prefix/v1/{key.namespace}/{key.digest[:2]}/{key.digest}.safetensors"


def content(segment: CompiledSegment, key: SegmentKey | None = None) -> bytes:
    return b"".join(encode(key or key_of(segment), segment))


def test_a_bucket_holds_what_a_store_s_folder_holds(server: Server, open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    write(tier, make(1))
    disk = DiskTier(tmp_path / "store")
    for number in (1, 2):
        disk.put(key_of(make(number)), make(number))
    disk.close()
    for number in (1, 2):
        file = disk.files.path(key_of(make(number)))
        assert path(key_of(make(number))).endswith(f"some/prefix/{file.relative_to(tmp_path / 'store')}")
        if number == 2:
            server.request("PUT", path(key_of(make(2))), file.read_bytes())
        assert server.request("GET", path(key_of(make(number)))) == file.read_bytes()
    assert isinstance(read(tier, 2), Hit), "so a copied folder is a bucket that works"


def test_a_server_that_is_killed_and_comes_back_without_its_bucket(server: Server, open_tier: OpenTier) -> None:
    tier = open_tier(f"{PATIENT}&pause=0.02")
    write(tier, make(1))
    server.kill()
    try:
        assert [read(tier, 1) for _ in range(3)] == [UNREACHABLE] * 3
        assert read(tier, 1) == NOT_ASKED
        assert tier.put(key_of(make(2)), make(2)) == Failure(FailureReason.NOT_ASKED)
    finally:
        server.start()
    until(lambda: tier.stats().breaker == "closed")
    server.request("DELETE", BUCKET)
    assert read(tier, 1) == ABSENT
    assert isinstance(tier.put(key_of(make(1)), make(1)), Stored)
    assert tier.flush()
    assert tier.stats().failures == {"not_asked": 1, "refused": 1}
    server.empty()
    tier.put(key_of(make(1)), make(1))
    assert tier.flush()
    assert isinstance(read(tier, 1), Hit)


def test_a_stopped_server_costs_one_deadline(server: Server, open_tier: OpenTier) -> None:
    write(open_tier(), make(1), make(2))
    tier = open_tier("deadline=0.4&pause=0.02")
    with server.stopped():
        before = time.monotonic()
        assert tier.get_many([(*wanted(make(number)), None) for number in (1, 2, 3)]) == [TIMEOUT] * 3
        assert time.monotonic() - before >= 0.4
        before = time.monotonic()
        assert [read(tier, 1) for _ in range(50)] == [NOT_ASKED] * 50
        assert not tier.remove(key_of(make(1)))
        assert time.monotonic() - before < 0.4
    patient = open_tier()
    until(lambda: isinstance(read(patient, 1), Hit))
    until(lambda: tier.stats().breaker == "closed")


def test_an_answer_in_drops_does_not_stretch_the_deadline(server: Server, open_tier: OpenTier) -> None:
    write(open_tier(), make(1), make(2, tokens=8000))
    with proxy(server.port) as between:
        tier = open_tier("deadline=2&rate=100MiB&pause=0.05", port=between.port)
        assert tier.answers()
        between.pace = 0.02
        before = time.monotonic()
        assert tier.get(*wanted(make(2, tokens=8000))) == TIMEOUT
        assert time.monotonic() - before < 60, "at that pace it would take minutes"
        between.pace = None
        patient = open_tier(port=between.port)
        assert isinstance(read(patient, 1), Hit)
        assert isinstance(patient.get(*wanted(make(2, tokens=8000))), Hit)


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (content(make(1))[:-40] + b"\0" * 40, MissReason.CORRUPT),
        (content(make(1))[:700], MissReason.TRUNCATED),
        (b"", MissReason.TRUNCATED),
        (b"<Error>no</Error>", MissReason.CORRUPT),
        (content(make(2)), MissReason.SWAPPED),
        (content(make(1), key_of(make(1), "b")), MissReason.SWAPPED),
        (content(make(1)).replace(b'"version":"1"', b'"version":"2"'), MissReason.WRONG_VERSION),
    ],
)
def test_what_is_not_what_was_put_is_a_miss_with_its_reason_and_removed(
    server: Server, open_tier: OpenTier, damaged: bytes, reason: MissReason
) -> None:
    tier = open_tier()
    write(tier, make(1), make(3))
    server.request("PUT", path(key_of(make(1))), damaged)
    report = tier.verify()
    assert (report.checked, report.damaged) == (2, ((key_of(make(1)), reason),))
    assert read(tier, 1) == Miss(reason)
    assert tier.flush()
    assert set(tier.keys()) == {key_of(make(3))}
    assert tier.stats().misses == {reason.value: 1}
    assert tier.stats().breaker == "closed"
    assert isinstance(read(tier, 3), Hit)


def test_listings_leave_out_what_is_not_ours(server: Server, open_tier: OpenTier) -> None:
    tier = open_tier()
    write(tier, make(1))
    tier.put(key_of(make(1), "a"), make(1))
    assert tier.flush()
    ours = path(key_of(make(2)))
    for other in (f"{BUCKET}/top", f"{BUCKET}/some/prefix/v1/x", ours.replace("/v1/", "/v2/"), ours[:-3], ours + "x"):
        server.request("PUT", other, b"somebody else's")
    server.request("PUT", f"{ours.rpartition('/')[0][:-2]}zz/{key_of(make(2)).digest}.safetensors", b"misplaced")
    assert set(tier.keys()) == {key_of(make(1)), key_of(make(1), "a")}
    assert [(row.key, row.bytes, row.tokens) for row in tier.rows(namespace("a"))] == [
        (key_of(make(1), "a"), len(content(make(1), key_of(make(1), "a"))), None)
    ]


def test_values_that_are_too_long_are_neither_written_nor_read(server: Server, open_tier: OpenTier) -> None:
    small = open_tier(f"{PATIENT}&max_bytes=2000")
    large = make(1, tokens=30)
    assert small.put(key_of(large), large) == Failure(FailureReason.TOO_LARGE)
    write(open_tier(), large)
    assert small.get(*wanted(large)) == Miss(MissReason.TOO_LARGE)
    assert isinstance(open_tier().get(*wanted(large)), Hit)


@contextmanager
def answering(status: int) -> Iterator[int]:
    """The port of a server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline()
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "miss", "failure"),
    [(403, "unreadable", "refused"), (401, "unreadable", "refused"), (500, "unreachable", "unreachable")],
)
def test_a_server_that_only_refuses_is_left_alone(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture, status: int, miss: str, failure: str
) -> None:
    with answering(status) as port, caplog.at_level(logging.DEBUG, "kvquilt"):
        tier = open_tier(f"{PATIENT}&pause=60", port=port)
        assert tier.put(key_of(make(1)), make(1))
        assert tier.flush()
        assert [read(tier, 1) for _ in range(3)] == [Miss(MissReason(miss)), Miss(MissReason(miss)), NOT_ASKED]
        assert tier.stats().failures == {failure: 1}
        with pytest.raises(StoreUnavailableError, match="remote tier s3://id:") as caught:
            tier.verify()
    assert "geheim" not in caplog.text + str(caught.value)
    assert "does not answer" in caplog.text


@pytest.mark.parametrize("reply", [b"+OK\r\n", b"\0" * 50, b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabcde"])
def test_a_server_that_talks_nonsense_is_a_miss(open_tier: OpenTier, reply: bytes) -> None:
    with saying(reply) as port:
        tier = open_tier("deadline=1&write_deadline=1&pause=60", port=port)
        assert all(isinstance(read(tier, 1), Miss) for _ in range(3))
        tier.put(key_of(make(1)), make(1))
        assert tier.flush()
        tier.remove(key_of(make(1)))
        tier.close()


def test_a_second_machine_finds_what_the_first_compiled(server: Server, tmp_path: Path) -> None:
    pairs = [wanted(make(number)) for number in (1, 2)]

    def compile(missing: list[int]) -> Iterator[tuple[int, CompiledSegment]]:
        for at in missing:
            yield at, make(at + 1)

    remote = f"{server.url}&{PATIENT}&flush=20"
    with Store.open(tmp_path / "one", 1 << 20, remote=remote) as one, one.fetch(pairs, compile) as held:
        assert [each.tier for each in held] == ["compiled", "compiled"]
    with Store.open(None, 1 << 20, remote=remote) as two:
        for tier in ("s3", "memory"):
            with two.fetch(pairs) as held:
                assert [each.tier for each in held] == [tier, tier]
                assert all(same(each.segment, make(number)) for each, number in zip(held, (1, 2), strict=True))
        assert two.rm(everything=True) == 2
        two.check_integrity()
    assert server.request("GET", f"{BUCKET}?list-type=2").count(b"<Key>") == 0


def test_credentials_may_come_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim")
    tier = open_remote(f"{server.url.replace('id:geheim@', '')}&{PATIENT}")
    write(tier, make(1))
    assert isinstance(read(tier, 1), Hit)
    tier.close()


def test_without_the_client_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(InputError, match=r"pip install 'kvquilt\[s3\]'") as caught:
        open_remote(Remote.parse("s3://id:geheim@bucket"))
    assert "geheim" not in str(caught.value)
