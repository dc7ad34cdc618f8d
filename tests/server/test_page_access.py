"""Who may use the page: the key it asks for, where it keeps it, and what it shows to whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvquilt.server.keyring import Keyring
from kvquilt.server.keys import KeyFile, Role
from tests import chromium
from tests.chromium import Browser
from tests.server.page_driver import Page, opened
from tests.server.running import Served, serving
from tests.server.test_access import key_file
from tests.waiting import until

pytestmark = pytest.mark.skipif(chromium.FOUND is None, reason=chromium.WHY_NOT)
KEPT = "[JSON.stringify(localStorage), document.cookie, location.href]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium.chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    return key_file(tmp_path / "keys", "ann", "bob")


@pytest.fixture
def served(keys: list[str], tmp_path: Path) -> Iterator[Served]:
    with serving(keyring=Keyring(tmp_path / "keys")) as started:
        for key, id in zip(keys, ("of-ann", "of-bob"), strict=True):
            started.http(key).post("/v1/documents", json={"id": id, "text": f"This is {id}."})
        yield started


def unlock(page: Page, key: str) -> None:
    page.fill("key", key)
    page.click("#unlock button")


def test_the_page_asks_for_a_key_and_shows_what_is_its_owners(
    browser: Browser, served: Served, keys: list[str]
) -> None:
    ann, bob = keys
    with opened(browser, served.url) as page:
        assert page.js("[document.getElementById('key').type, document.activeElement.id]") == ["password", "key"]
        assert page.js("['documents', 'talk', 'standing'].map(id => document.getElementById(id).hidden)") == [True] * 3
        assert "of-ann" not in page.js("document.documentElement.outerHTML")
        unlock(page, "kvq-wrong")
        page.until("document.getElementById('trouble').innerText === 'The server does not take this key.'")
        unlock(page, "schlüssel")
        page.until("document.getElementById('trouble').innerText.startsWith('A key has no spaces')")
        unlock(page, ann)
        page.ready("of-ann")
        assert page.texts("#library .name") == ["of-ann"]
        page.ask("What is this?", "none")
        assert ann not in page.js("document.documentElement.outerHTML")
        assert page.js(KEPT) == ["{}", "", f"{served.url}/"]
        page.reload()
        page.ready("of-ann")
        page.click("#forget")
        page.until("!document.getElementById('lock').hidden")
        assert page.js("sessionStorage.length") == 0
        assert page.texts(".turn") == page.texts("#library .name") == page.texts("#chosen .name") == []
        unlock(page, bob)
        page.ready("of-bob")
        assert page.texts("#library .name") == ["of-bob"]
        assert page.text(".rate") == "Token hit rate: no answers yet.", "what others asked is told to nobody"
    with opened(browser, served.url) as page:
        assert page.js("document.getElementById('lock').hidden") is False, "a new tab has no key"


def test_a_key_that_is_revoked_locks_the_page(
    browser: Browser, served: Served, keys: list[str], tmp_path: Path
) -> None:
    with opened(browser, served.url) as page:
        unlock(page, keys[0])
        page.ready("of-ann")
        held = KeyFile.read(tmp_path / "keys")
        held.without(held.keys[0].id).write(tmp_path / "keys")
        page.fill("question", "What is this?")
        page.click("#go")
        page.until("!document.getElementById('lock').hidden && document.getElementById('talk').hidden")
        assert "of-ann" not in page.js("document.documentElement.outerHTML")


def test_public_documents_are_there_to_be_read(
    browser: Browser, served: Served, keys: list[str], tmp_path: Path
) -> None:
    held, _, publisher = KeyFile.read(tmp_path / "keys").added(role=Role.PUBLISHER)
    held.write(tmp_path / "keys")
    http = served.http(publisher)
    http.post("/v1/documents", json={"id": "handbook", "text": "This is for all."})
    until(lambda: http.get("/v1/documents/handbook").json()["state"] == "ready")
    with opened(browser, served.url) as page:
        unlock(page, keys[0])
        page.ready("of-ann", "public/handbook")
        assert page.texts("#chosen .name") == ["of-ann"], "what others put there is not in a prompt unasked"
        assert page.js(
            "[...document.querySelectorAll('#library li')].map(li => !li.querySelector('button').hidden)"
        ) == [
            True,
            False,
        ]
        page.click("#library li:nth-child(2) input")
        assert page.texts("#chosen .name") == ["of-ann", "public/handbook"]
        page.ask("What is this?", "none")
        assert page.js("[...document.querySelectorAll('.run')].map(run => run.title.split(':')[0])") == [
            "1. opening", "2. of-ann", "3. public/handbook", "4. question"
        ]  # fmt: skip


def test_an_operators_key_opens_nothing_here_and_is_told_so(browser: Browser, served: Served, tmp_path: Path) -> None:
    held, _, operator = KeyFile.read(tmp_path / "keys").added(role=Role.OPERATOR)
    held.write(tmp_path / "keys")
    with opened(browser, served.url) as page:
        unlock(page, operator)
        page.until("document.getElementById('trouble').innerText.includes('operator')")
        assert page.js("[sessionStorage.length, document.getElementById('lock').hidden]") == [0, False]
