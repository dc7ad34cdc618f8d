"""`kvquilt serve` as a process of its own, for the benchmarks of the server; and what asks it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from urllib.parse import urlsplit

REPOSITORY = Path(__file__).parents[1]


@dataclass(eq=False)
class Server:
    """A server that runs, by its address.

    Attributes:
        said: its lines on stderr so far.
    """

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def rss(self) -> int:
        """Resident bytes of the process now."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def ask(self, path: str, body: Any = None, method: str | None = None, timeout: float = 600) -> tuple[int, Any]:
        """Status and JSON, or text where it is none."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            headers = {} if body is None else {"content-type": "application/json"}
            connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
            response = connection.getresponse()
            raw = response.read().decode()
        finally:
            connection.close()
        try:
            return response.status, json.loads(raw)
        except ValueError:
            return response.status, raw

    def events(self, path: str, body: Any, timeout: float = 600) -> Iterator[Any]:
        """Every event of a stream as it comes; closing the iterator hangs up.

        Raises:
            RuntimeError: the status is not 200, or the stream ends without its mark.
        """
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read(300)!r}")
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
            raise RuntimeError("the stream ended without its mark")
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Samples of ``/metrics`` by name and labels, without the prefix and the label that all have."""
        found = re.findall(r"^kvquilt:(\S+) (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        return {plain(name): float(value) for name, value in found}

    def upload(self, documents: list[dict[str, str]], seconds: float = 1200) -> None:
        """Take documents and wait until all are compiled."""
        status, told = self.ask("/v1/documents", {"documents": documents})
        if status != 202:
            raise RuntimeError(f"{status}: {told}")
        for each in documents:
            until(lambda each=each: self.ask(f"/v1/documents/{each['id']}")[1]["state"] == "ready", seconds)

    def rests(self) -> None:
        """Wait until nothing is being answered."""
        until(lambda: not any(self.metrics()[f"num_requests_{what}"] for what in ("running", "waiting")), 120)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; the exit status."""
        self.process.send_signal(how)
        return self.process.wait(120)


@contextmanager
def server(model: str, store: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """It listens when the block begins and is ended behind it, if it still runs."""
    command = [str(Path(sys.executable).with_name("kvquilt")), "serve", model, "--port", "0", *options]
    env = {**os.environ, "KVQUILT_STORE_DIR": str(store), **(environment or {})}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, cwd=REPOSITORY)
    made = Server(process)
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            made.said.append(line)
            if found := re.search(r"http://\S+(?=/v1)", line):
                made.url = made.url or found[0]
                listening.set()
        listening.set()

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    try:
        if not listening.wait(300) or not made.url:
            raise RuntimeError("".join(made.said) or "the server said nothing for five minutes")
        until(lambda: made.ask("/ready")[0] == 200, 60)
        yield made
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reading.join(10)


def until(holds: Callable[[], bool], seconds: float) -> None:
    """Ask again and again until it holds.

    Raises:
        TimeoutError: it did not within `seconds`.
    """
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} seconds")
        time.sleep(0.05)


def stored(folder: str) -> list[dict[str, Any]]:
    """Segments on disk when nobody has them open, as `kvquilt store ls` lists them."""
    command = [str(Path(sys.executable).with_name("kvquilt")), "store", "ls", "--json"]
    env = {**os.environ, "KVQUILT_STORE_DIR": folder}
    return list(json.loads(subprocess.run(command, capture_output=True, check=True, env=env).stdout))


def plain(sample: str) -> str:
    """A sample's name and labels but the model's name."""
    return re.sub(r',?model_name="[^"]*"', "", sample).replace("{,", "{").replace("{}", "")


def finish(result: dict[str, Any], out: Path, bars: dict[str, bool]) -> None:
    """Write the result; then end the process with 1 if a bar was missed.

    Args:
        bars: what was found, in words, and whether that is as it must be.
    """
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if missed := [said for said, met in bars.items() if not met]:
        sys.exit("missed: " + "; ".join(missed))


def texts(count: int, characters: int) -> list[dict[str, str]]:
    """Different documents of real text, as uploads."""
    whole = "\n\n".join(topics[name].strip() for name in sorted(topics))
    if count * characters > len(whole):
        raise ValueError(f"there is text for {len(whole) // characters} such documents")
    return [{"id": f"help-{n}", "text": whole[n * characters : (n + 1) * characters].strip()} for n in range(count)]


def chat(documents: list[dict[str, str]], question: str, new: int, **more: Any) -> dict[str, Any]:
    """A request over uploaded documents, by their ids alone."""
    named = [{"type": "document", "id": each["id"]} for each in documents]
    content = [*named, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": new, "temperature": 0, **more}
