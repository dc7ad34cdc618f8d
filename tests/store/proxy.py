"""A TCP proxy on the loopback that can be told to pass only so much, or only so fast, of what a server answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK = 1 << 16


class Proxy:
    """Forwards to `port`.

    Attributes:
        allowance: bytes of answers that still pass; then nothing comes and nobody hangs up. None: all.
        pace: seconds before every 64 bytes of an answer; None: at once.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.allowance: int | None = None
        self.pace: float | None = None
        self.connections = 0
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._ended = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._run(self._accept)

    def allow(self, allowance: int | None) -> None:
        with self._changed:
            self.allowance = allowance
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _run(self, work: object, *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args, daemon=True))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            self.connections += 1
            self._sockets += [client, server]
            self._run(self._forward, client, server, False)
            self._run(self._forward, server, client, True)

    def _forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while content := source.recv(_CHUNK):
                while content:
                    piece = self._piece(content) if answers else content
                    if self._ended:
                        return
                    target.sendall(piece)
                    content = content[len(piece) :]
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def _piece(self, content: bytes) -> bytes:
        """How much of an answer may pass now; waits while nothing may."""
        with self._changed:
            self._changed.wait_for(lambda: self.allowance != 0 or self._ended)
            if self.pace is not None:
                self._changed.wait(self.pace)
                content = content[:64]
            if self.allowance is not None:
                content = content[: self.allowance]
                self.allowance -= len(content)
            return content


@contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    running = Proxy(port)
    try:
        yield running
    finally:
        running.close()
