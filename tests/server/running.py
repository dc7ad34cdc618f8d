"""A real server in a thread, on a loopback socket, over a tiny model; and the real client of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import openai

from kvquilt import Engine
from kvquilt.server.limits import Limits
from kvquilt.server.running import listening, make_server, url
from kvquilt.server.service import Service
from tests.engines import at_rest, make_engine
from tests.waiting import until

MODEL = "tiny"


@dataclass
class Served:
    engine: Engine
    service: Service
    url: str
    _clients: list[Any] = field(default_factory=list)

    def client(self, key: str = "unused", **options: Any) -> openai.OpenAI:
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)
        self._clients.append(made)
        return made

    def http(self, key: str = "") -> httpx2.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        made = httpx2.Client(base_url=self.url, headers=headers, timeout=60)
        self._clients.append(made)
        return made

    def rests(self) -> None:
        """All that requests took is given back, within a moment."""
        until(lambda: self.service.scheduler.streams == 0 and self.service.scheduler.waiting == 0)
        until(lambda: self.service.compiler.idle)
        self.service.scheduler.check_integrity()
        at_rest(self.engine)


@contextmanager
def serving(
    limits: Limits | None = None, directory: Path | None = None, trained: bool = False, **options: Any
) -> Iterator[Served]:
    """Everything is closed at the end, in the order of a process that is told to stop."""
    with TemporaryDirectory() as made, make_engine(directory=directory, trained=trained, conversations=0) as engine:
        service = Service(engine, MODEL, (directory or Path(made)) / "documents", limits or Limits(), **options)
        with over(service) as served:
            yield served


@contextmanager
def over(service: Service) -> Iterator[Served]:
    """A server over this service, whose engine stays open."""
    listener = listening("127.0.0.1", 0)
    server = make_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    served = Served(service.engine, service, url(listener))
    try:
        until(lambda: server.started)
        yield served
    finally:
        for client in served._clients:
            client.close()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
