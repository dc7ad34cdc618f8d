"""A real S3 server for tests: moto's, over HTTP; what it holds is in its memory."""

from __future__ import annotations

import importlib.util
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.store import server
from tests.store.server import SECONDS

FOUND = all(importlib.util.find_spec(name) for name in ("moto", "flask", "flask_cors", "obstore"))
WHY_NOT = "no S3 server on this machine: it needs the packages moto, flask and flask-cors, and obstore to speak to it"
BUCKET = "segments"


class Server(server.Server):
    """The server with one bucket, and plain requests to it that do not pass through what is tested."""

    @property
    def url(self) -> str:
        endpoint = f"http://127.0.0.1:{self.port}"
        return f"s3://id:geheim@{BUCKET}/some/prefix?endpoint={endpoint}&region=us-east-1"

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def answers(self) -> bool:
        self.empty()
        return True

    def empty(self) -> None:
        """Forget everything but the bucket."""
        self.request("POST", "moto-api/reset")
        self.request("PUT", BUCKET)

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The body of the answer; other codes than 2xx raise `OSError`."""
        address = f"http://127.0.0.1:{self.port}/{path}"
        # without a type it would be a form, and read as one; whoever signs may read, and no signature is checked
        headers = {"content-type": "application/octet-stream", "authorization": "AWS id:x"}
        asked = urllib.request.Request(address, body, headers, method=method)
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            content: bytes = answer.read()
            return content


@contextmanager
def running() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.kill()
