"""A headless Chromium, told what to do over its devtools pipe: no driver and no download is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WHY_NOT = "no chromium and no chrome on this machine"
_SECONDS = 120.0
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "ArrowDown": (40, ""), "ArrowUp": (38, "")}
# the browser reads commands from 3 and writes to 4, whatever numbers the pipes have here
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


@dataclass(eq=False, slots=True)
class Browser:
    """The process, by its two pipes."""

    commands: int
    answers: int
    said: list[dict[str, Any]] = field(default_factory=list)
    _sent: int = 0
    _rest: bytes = b""

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; what the browser says meanwhile is in `said`."""
        self._sent += 1
        command: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while (found := self._next(until, method)).get("id") != self._sent:
            self.said.append(found)
        assert "error" not in found, (method, found)
        answer: dict[str, Any] = found["result"]
        return answer

    def wait(self, method: str, session: str) -> None:
        """Until the browser says so, if it has not."""
        until = time.monotonic() + _SECONDS
        while not any(each.get("method") == method and each.get("sessionId") == session for each in self.said):
            self.said.append(self._next(until, method))

    def _next(self, until: float, awaited: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser says nothing to {awaited} in {_SECONDS:.0f} seconds"
            read = os.read(self.answers, 1 << 20)
            assert read, f"the browser has ended before {awaited}"
            self._rest += read
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message


@dataclass(frozen=True, eq=False, slots=True)
class Tab:
    """One page."""

    browser: Browser
    session: str

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **parameters)

    def open(self, address: str, offline: bool = True) -> None:
        """Returns when the page and all that it asks for is loaded; by default there is no network."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        if offline:
            speed = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
            self.send("Network.emulateNetworkConditions", offline=True, **speed)
        self.send("Page.navigate", url=address)
        self.browser.wait("Page.loadEventFired", self.session)

    def size(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """Its value; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        code, text = _KEYS.get(key, (ord(key[0].upper()), key))
        what = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **what)
        self.send("Input.dispatchKeyEvent", type="keyUp", **what)

    def picture(self, path: Path) -> None:
        """The whole page, in the format that the name ends with: png, webp or jpeg."""
        kind = path.suffix.removeprefix(".")
        quality = {} if kind == "png" else {"quality": 85}
        taken = self.send("Page.captureScreenshot", format=kind, captureBeyondViewport=True, **quality)
        path.write_bytes(base64.b64decode(taken["data"]))

    def of(self, method: str) -> list[dict[str, Any]]:
        """What the browser said of this page under that name."""
        mine = (each for each in self.browser.said if each.get("sessionId") == self.session)
        return [each["params"] for each in mine if each["method"] == method]

    def complaints(self) -> list[object]:
        """Everything in the page's console, and whatever its script raised."""
        return [*self.of("Runtime.consoleAPICalled"), *self.of("Log.entryAdded"), *self.of("Runtime.exceptionThrown")]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser that ends with the block; its settings are in `profile`."""
    assert FOUND is not None, WHY_NOT
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    # from 10 on: neither is 3 or 4
    theirs = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (theirs_in, theirs_out)]
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]  # fmt: skip
    command = [sys.executable, "-c", _START, *map(str, theirs), FOUND, *options]
    process = subprocess.Popen(command, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for each in (theirs_in, theirs_out, *theirs):
        os.close(each)
    browser = Browser(commands, answers)
    try:
        yield browser
        browser.send("Browser.close")
    finally:
        os.close(commands)  # which it takes as the end, too
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)


@contextmanager
def tab(browser: Browser) -> Iterator[Tab]:
    """A page of its own."""
    target = browser.send("Target.createTarget", url="about:blank")["targetId"]
    session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    yield Tab(browser, session)
    browser.send("Target.closeTarget", targetId=target)
