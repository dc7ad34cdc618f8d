"""Connections that send their requests slowly or read nothing, and too many of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvquilt.server import connection, running
from kvquilt.server.limits import Limits
from tests.server.running import Served, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(connection, "PATIENCE", 0.5)
    monkeypatch.setattr(connection, "UNREAD", 0.5)
    monkeypatch.setattr(running, "_SPARE", 4)
    with serving(Limits(streams=1, queue=1)) as made:
        yield made


def connect(served: Served, receives: int | None = None) -> socket.socket:
    """`receives`: bytes that the system takes for it unread."""
    host, _, port = served.url.rpartition("/")[2].partition(":")
    made = socket.socket()
    if receives is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    made.settimeout(20)
    made.connect((host, int(port)))
    return made


def ends(slow: socket.socket) -> bytes:
    """Send a byte now and then until the server hangs up; what it had said by then."""
    said, end = b"", time.monotonic() + 20
    slow.settimeout(0.1)
    try:
        while time.monotonic() < end:
            slow.sendall(b"x")
            try:
                if not (found := slow.recv(1000)):
                    return said
                said += found
            except TimeoutError:
                pass
    except OSError:
        return said
    raise AssertionError("it is still waited for")


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(served: Served) -> None:
    with connect(served) as slow:
        slow.sendall(HEAD)
        assert ends(slow) == b""


def test_nor_is_the_head_of_a_second_request(served: Served) -> None:
    with connect(served) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" + HEAD)
        assert ends(slow).startswith(b"HTTP/1.1 200")


def test_an_answer_may_take_longer_than_a_head(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvquilt.model.steps import Steps

    step = Steps.step

    def slow(self: Steps, *args: object) -> object:
        time.sleep(0.3)  # not a wait for anything: the model is this slow
        return step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Steps, "step", slow)
    answer = served.http().post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
    assert answer.status_code == 200


def test_who_never_reads_is_not_written_to_for_ever(served: Served) -> None:
    with connect(served, receives=4096) as deaf:
        deaf.settimeout(0.1)
        with pytest.raises(ConnectionError):
            ask_and_never_read(deaf)


def ask_and_never_read(deaf: socket.socket) -> None:
    """Whole requests, one behind the other, for as long as they are taken."""
    requests, end = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10_000, time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(TimeoutError):
            requests = requests[deaf.send(requests[:4096]) :]


def test_one_connection_too_many_is_told_so(served: Served) -> None:
    held = [connect(served) for _ in range(6)]
    try:
        with connect(served) as late:
            late.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = b"".join(iter(lambda: late.recv(2000), b""))
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 2" in answer
        assert b"too_many_connections" in answer
    finally:
        for each in held:
            each.close()
