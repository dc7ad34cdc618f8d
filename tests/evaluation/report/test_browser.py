"""The report in a real browser, opened from its file: what it asks for, its keys, its colours, a narrow screen.

With ``REPORT_SCREENSHOT=FILE.png`` pictures of the page are left there: as it opens, and on a screen 375 pixels wide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import chromium
from tests.chromium import Browser, Tab
from tests.evaluation.report.test_report import ARMS, HOSTILE, folder, report

pytestmark = pytest.mark.skipif(chromium.FOUND is None, reason=chromium.WHY_NOT)
_FOCUSED = "document.activeElement.parentElement.id"
_COUNT = "document.querySelector('.count').textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium.chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = folder(tmp_path_factory.mktemp("report") / "run")
    report(made)
    return (made / "report.html").as_uri()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Tab]:
    with chromium.tab(browser) as opened:
        opened.size(1280, 900)
        opened.open(address)
        yield opened


def leave_picture(page: Tab, suffix: str = "") -> None:
    if asked := os.environ.get("REPORT_SCREENSHOT"):
        path = Path(asked)
        path.parent.mkdir(parents=True, exist_ok=True)
        page.picture(path.with_name(f"{path.stem}{suffix}{path.suffix}"))


def colours(page: Tab, what: str) -> tuple[str, str]:
    """Text and ground of the first such element."""
    style = f"getComputedStyle(document.querySelector({what!r}))"
    text, ground = page.evaluate(f"[{style}.color, {style}.backgroundColor]")
    return text, ground


def contrast(first: str, second: str) -> float:
    """Of two opaque colours as the web's guidelines define it, from 1 to 21."""

    def light(colour: str) -> float:
        found = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour)
        assert found, f"not opaque: {colour}"
        parts = (int(each) / 255 for each in found.groups())
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, bright = sorted((light(first), light(second)))
    return (bright + 0.05) / (dark + 0.05)


def test_it_opens_from_its_file_and_nothing_leaves(page: Tab, address: str) -> None:
    assert [each["request"]["url"] for each in page.of("Network.requestWillBeSent")] == [address]
    assert page.complaints() == []
    assert page.evaluate("document.title") == "Evaluation: jsonl:<i>own</i> on tiny|model", "a document's script ran"
    shown = "[...document.querySelectorAll('table.figures')].map(t => [t.caption.innerText, t.getClientRects().length])"
    figures = ["How far from full prefill", "Answers (contains_em)", "Damage", "Work", "Group by group (contains_em)"]
    titles = [*figures, "Where it comes from"]
    assert page.evaluate(shown) == [[title, 1] for title in titles]
    drawn = "[...document.querySelectorAll('figure svg')].map(svg => Math.min(svg.clientWidth, svg.clientHeight) > 100)"
    assert page.evaluate(drawn) == [True] * 4
    assert page.evaluate(_COUNT) == "3 items.", "the page's own script counts what is shown"
    leave_picture(page)


def test_its_policy_holds_back_whatever_would_leave(page: Tab) -> None:
    """Else that nothing left would say little: the page was asked from within, as a document's script would."""
    refused = page.evaluate(
        "new Promise(done => {"
        " const told = event => done([event.violatedDirective, event.blockedURI]);"
        " document.addEventListener('securitypolicyviolation', told);"
        " fetch('http://127.0.0.1:9/out').catch(() => 0); })"
    )
    assert refused == ["connect-src", "http://127.0.0.1:9/out"]
    assert page.complaints() != []
    markup = '"<img src=x onerror=window.taken=1>"'
    page.evaluate(f"document.querySelector('.text').insertAdjacentHTML('beforeend', {markup})")
    page.evaluate("new Promise(done => setTimeout(done, 100))")
    assert page.evaluate("window.taken") is None


def test_items_are_walked_and_opened_by_keys(page: Tab) -> None:
    for key, item in (("j", 0), ("j", 1), ("k", 0), ("k", 0), ("j", 1), ("j", 2), ("j", 2)):
        page.press(key)
        assert page.evaluate(_FOCUSED) == f"run-0-item-{item}", key
    opened = "[...document.querySelectorAll('.item')].map(item => item.open)"
    assert page.evaluate(opened) == [False, False, False]
    page.press("Enter")
    assert page.evaluate(opened) == [False, False, True]
    seen = page.evaluate("document.activeElement.parentElement.innerText")
    shown = HOSTILE.replace("\x1b", "\ufffd")
    assert f"answer {shown}" in seen
    assert all(arm in seen for arm in ARMS)
    page.press("Enter")
    assert page.evaluate(opened) == [False, False, False]


def test_who_chooses_items_by_keys_walks_those_alone(page: Tab) -> None:
    choices = page.evaluate("[...document.querySelector('.only').options].map(option => option.text)")
    page.evaluate("document.querySelector('.only').focus()")
    for _ in range(choices.index("right in full, wrong in epic:k=2")):
        page.press("ArrowDown")
    assert page.evaluate(_COUNT) == "1 items."
    page.press("j")
    assert page.evaluate("document.activeElement.className") == "only", "a letter chooses in a list, it does not walk"
    page.evaluate("document.activeElement.blur()")
    for key in ("j", "j", "k"):
        page.press(key)
        assert page.evaluate(_FOCUSED) == "run-0-item-1", key


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_became_of_a_document_is_a_colour_that_its_text_stands_out_of(page: Tab, scheme: str) -> None:
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    _, ground = colours(page, "body")
    found = {}
    for arm, kind in (("full", "recomputed"), ("none", "reused")):
        page.evaluate(
            "{ const list = document.querySelector('.colour');"
            f" list.value = {ARMS.index(arm)}; list.dispatchEvent(new Event('change')); }}"
        )
        assert page.evaluate("document.querySelector('.document').className") == f"document shows-{kind}"
        assert page.evaluate("document.querySelector('.document .text').getClientRects().length") == 1
        text, found[kind] = colours(page, ".document .text")
        assert contrast(text, found[kind]) >= 4.5
        assert colours(page, f".became .p-{kind}")[1] == found[kind], "the table has the same colours"
    assert len({ground, *found.values()}) == 3


def test_a_narrow_screen_scrolls_tables_and_nothing_else(page: Tab) -> None:
    page.size(375, 800)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(width) == 0
    wide = "[...document.querySelectorAll('table')].map(t => [t.parentElement.className, t.scrollWidth > innerWidth])"
    found = page.evaluate(wide)
    assert {name for name, _ in found} == {"scroll"}
    assert any(beyond for _, beyond in found), "this page has no table that must scroll: it shows nothing"
    answers = page.evaluate(
        "[...document.querySelectorAll('.answers .said')].map(a => a.getBoundingClientRect().width)"
    )
    assert len(answers) == 3 * len(ARMS)
    assert min(answers) >= 150, "answers are squeezed until each is a column of letters"
    figures = page.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().right)")
    assert max(figures) <= 375
    leave_picture(page, "-375")
