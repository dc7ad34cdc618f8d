"""What a person does on the page of a server, done in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import chromium
from tests.chromium import Browser, Tab
from tests.waiting import until

DONE = "document.getElementById('turns').ariaBusy === 'false' && document.querySelectorAll('.turn').length === {turns}"

BEGUN = "['lock', 'talk'].some(id => !document.getElementById(id).hidden)"


@dataclass(frozen=True, slots=True)
class Page:
    """The page in a tab of its own."""

    tab: Tab

    def js(self, expression: str) -> Any:
        return self.tab.evaluate(expression)

    def until(self, condition: str, seconds: float = 30.0) -> None:
        """Wait for a condition of the page, or fail with it."""
        try:
            until(lambda: bool(self.js(f"!!({condition})")), seconds)
        except AssertionError:
            raise AssertionError(f"it never held: {condition}\n{self.js('document.body.innerText')}") from None

    def reload(self) -> None:
        """As the browser does it; returns when the new page has begun."""
        self.js("{ window.old = true; location.reload(); }")
        self.until(f"!window.old && document.readyState === 'complete' && {BEGUN}")

    def fill(self, id: str, value: str) -> None:
        """As typed: the field has the focus, and what was in it goes."""
        self.js(f"{{ const f = document.getElementById({id!r}); f.focus(); f.value = ''; }}")
        self.tab.send("Input.insertText", text=value)

    def choose(self, id: str, value: str) -> None:
        self.js(
            f"{{ const f = document.getElementById({id!r}); f.value = {json.dumps(value)};"
            " f.dispatchEvent(new Event('change')); }"
        )

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first such element."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{found}.scrollIntoView({{block: 'center'}})")
        place = self.js(f"{{ const r = {found}.getBoundingClientRect(); [r.x + r.width / 2, r.y + r.height / 2]; }}")
        what = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.tab.send("Input.dispatchMouseEvent", type=kind, **what)

    def pick(self, *paths: Path) -> None:
        """Choose files in the field for them."""
        node = self.tab.send("Runtime.evaluate", expression="document.getElementById('files')")["result"]["objectId"]
        self.tab.send("DOM.setFileInputFiles", objectId=node, files=[str(path) for path in paths])

    def drop(self, *paths: Path) -> None:
        """Drag files over the field for them and let go."""
        x, y = self.js("{ const r = document.getElementById('drop').getBoundingClientRect(); [r.x + 5, r.y + 5]; }")
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.tab.send("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    def ready(self, *ids: str) -> None:
        """Wait until these are compiled."""
        for id in ids:
            at = f"[...document.querySelectorAll('#library li')].find(li => li.innerText.includes({json.dumps(id)}))"
            self.until(f"{at}?.querySelector('.state').innerText.startsWith('ready')")

    def ask(
        self,
        question: str,
        method: str = "none",
        compare: bool = False,
        length: int = 6,
        turns: int = 1,
        seconds: float = 30.0,
    ) -> None:
        """Ask, and wait for all of the answer and what it is told of."""
        self.choose("method", method)
        self.js(f"document.getElementById('compare').checked = {str(compare).lower()}")
        self.fill("length", str(length))
        self.fill("question", question)
        self.click("#go")
        self.until(DONE.format(turns=turns), seconds)
        self.until(
            "[...document.querySelectorAll('.turn:last-child .side')].every(side => side.querySelector('figure'))"
        )

    def text(self, selector: str) -> str:
        found: str = self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")
        return found


@contextmanager
def opened(browser: Browser, url: str, width: int = 1280) -> Iterator[Page]:
    with chromium.tab(browser) as tab:
        tab.size(width, 900)
        tab.open(f"{url}/", offline=False)
        page = Page(tab)
        page.until(BEGUN)
        yield page
