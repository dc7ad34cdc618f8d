"""The page in a real browser, on a real server over a tiny model: documents, questions, what it draws, who may use it.

With ``PAGE_SCREENSHOT=FILE.png`` pictures of it are left there: in light and dark colours and 375 pixels wide.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvquilt import Engine
from kvquilt.model.steps import Steps
from tests import chromium
from tests.chromium import Browser
from tests.engines import documents
from tests.server.page_driver import Page, opened
from tests.server.running import Served, serving

pytestmark = pytest.mark.skipif(chromium.FOUND is None, reason=chromium.WHY_NOT)
HOSTILE = "<img src=x onerror=window.taken=1>"
FOCUSED = "document.activeElement.id || document.activeElement.getAttribute('aria-label')"
CHOSEN = "#chosen .name"
SIDE = ".turn:last-child .side:nth-child({})"
KINDS = "[...document.querySelectorAll({!r})].map(s => s.className).join(' ')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium.chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for each in documents(3, 160):
        (folder / f"{each.id}.md").write_text(each.text, encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "latin.txt").write_bytes("Bäcker".encode("latin-1"))
    return folder


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as started:
        yield started


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with opened(browser, served.url) as made:
        yield made


def put(served: Served, page: Page, *given: dict[str, Any]) -> None:
    """Documents that are there, compiled, before the page looks."""
    assert served.http().post("/v1/documents", json={"documents": given}).status_code == 202
    page.reload()
    page.ready(*(each["id"] for each in given))


def plain(count: int = 3) -> list[dict[str, Any]]:
    return [{"id": each.id, "text": each.text} for each in documents(count, 160)]


def leave_picture(page: Page, suffix: str) -> None:
    if asked := os.environ.get("PAGE_SCREENSHOT"):
        path = Path(asked)
        path.parent.mkdir(parents=True, exist_ok=True)
        page.tab.picture(path.with_name(f"{path.stem}{suffix}{path.suffix}"))


def test_files_become_documents_that_an_answer_reuses(page: Page, served: Served, files: Path) -> None:
    assert page.js("document.getElementById('library').children.length") == 0
    page.pick(*sorted(files.glob("*.md")))
    page.ready("break.md", "pass.md", "with.md")
    assert page.texts(CHOSEN) == ["break.md", "pass.md", "with.md"]
    page.ask("What does it do?", "none")
    said = page.text(SIDE.format(1) + " .answer")
    content: Any = [*({"type": "document", "id": f"{name}.md"} for name in ("break", "pass", "with"))]
    content.append({"type": "text", "text": "\nQuestion: What does it do?"})
    system = {"role": "system", "content": served.engine.template.system}
    same = served.client().chat.completions.create(
        model="tiny", temperature=0, max_tokens=6, messages=[system, {"role": "user", "content": content}],
        extra_body={"kvquilt": {"method": "none"}},
    )  # fmt: skip
    assert said.split() == (same.choices[0].message.content or "").split()
    runs = same.kvquilt["runs"]  # type: ignore[attr-defined]
    assert [run["document"] for run in runs] == [None, "break.md", "pass.md", "with.md", None]
    drawn = "[...document.querySelectorAll('.strip .run')].map(run => [run.firstChild.className, +run.style.flexGrow])"
    assert page.js(drawn) == [[run["kept"], run["tokens"]] for run in runs]
    assert [kind for kind, _ in page.js(drawn)] == ["exact", "exact", "reused", "reused", "inline"]
    widths = page.js("[...document.querySelectorAll('.strip .run')].map(run => run.getBoundingClientRect().width)")
    tokens = [run["tokens"] for run in runs]
    assert [w / sum(widths) for w in widths] == pytest.approx([t / sum(tokens) for t in tokens], abs=0.02)
    page.js("document.querySelectorAll('details').forEach(each => each.open = true)")
    rows = page.texts(".turn table tbody tr")
    assert [row.split("\t")[:2] for row in rows] == [
        ["1", "opening"], ["2", "break.md"], ["3", "pass.md"], ["4", "with.md"], ["5", "question"]
    ]  # fmt: skip
    assert "moved, not recomputed" in rows[2]
    assert f"reused {runs[2]['tokens'] + runs[3]['tokens']}" in page.text(".turn .legend").replace(",", "")
    assert "is not known" in page.text(SIDE.format(1)), "nothing was read in full yet, and no number is made up"
    assert "Token hit rate" in page.text(".rate")
    assert page.tab.complaints() == []


def test_files_may_be_dropped_and_what_cannot_be_taken_is_said(page: Page, files: Path) -> None:
    page.drop(files / "with.md", files / "picture.png", files / "latin.txt")
    page.ready("with.md")
    page.until("document.getElementById('documents-trouble').innerText.includes('latin.txt')")
    assert page.text("#documents-trouble") == (
        "picture.png: only .txt and .md files are taken. latin.txt: cannot be read as UTF-8."
    )
    assert page.texts("#library .name") == ["with.md"]


def test_compiling_is_watched_until_the_document_is_ready(
    page: Page, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, compile_all = threading.Event(), Engine.compile

    def compiled(self: Engine, *args: Any, **options: Any) -> Any:
        options["progress"](1, 4)
        assert go.wait(30)
        return compile_all(self, *args, **options)

    monkeypatch.setattr(Engine, "compile", compiled)
    page.pick(files / "with.md")
    page.until("document.querySelector('#library .state.compiling') && document.querySelector('progress').value === 1")
    shown = "{ const p = document.querySelector('#library progress'); [p.value, p.max, p.hidden, p.ariaLabel]; }"
    assert page.js(shown) == [1, 4, False, "Compiling with.md"]
    go.set()
    page.ready("with.md")
    assert page.js("document.querySelector('#library progress').hidden")
    assert page.text("#documents-said") == "with.md: ready"
    page.until("[...document.querySelectorAll('#standing tr')].some(row => row.innerText === 'ready\\t1')")
    (memory,) = (row.split("\t") for row in page.texts("#standing tbody tr") if row.startswith("memory"))
    assert int(memory[1]) > 0
    assert memory[2].endswith("kB")


def test_full_prefill_beside_it_is_measured_and_differences_are_marked(page: Page, served: Served) -> None:
    put(served, page, *plain())
    page.ask("What does it do?", "none", compare=True, length=24)
    ours, full = (page.text(SIDE.format(n) + " .answer") for n in (1, 2))
    assert ours != full, "choose other documents: this pair shows no difference"
    marked = [page.texts(SIDE.format(n) + " mark") for n in (1, 2)]
    assert all(marked)
    unmarked = "[...document.querySelectorAll({!r})].map(a => [...a.childNodes].filter(n => n.nodeType === 3)"
    unmarked += ".map(n => n.data.trim()).join(' '))"
    left, right = (page.js(unmarked.format(SIDE.format(n) + " .answer"))[0].split() for n in (1, 2))
    assert left == right, "what is not marked is the same"
    assert "stand in both answers" in page.text(".contrast")
    assert set(page.js(KINDS.format(SIDE.format(2) + " .run > span")).split()) == {"inline", "recomputed"}
    assert "measured beside it" in page.text(SIDE.format(1))
    assert " than full prefill." in page.text(SIDE.format(1) + " .times")
    page.ask("And why?", "none", turns=2)
    assert "estimated from its operations and the speed of your last 1 full prefill" in page.text(SIDE.format(1))
    told = served.http().get("/v1/kvquilt/state").json()
    assert (told["answers"], told["full_prefill"]["measured"]) == (3, 1)


def test_a_document_that_is_partly_recomputed_is_a_block_of_two_kinds(page: Page, served: Served) -> None:
    put(served, page, *plain(2))
    page.ask("What does it do?", "epic")
    assert page.js(KINDS.format(".run:nth-child(3) > span")) == "reused recomputed"
    assert page.js("+document.querySelector('.run:nth-child(3) .recomputed').style.flexGrow") == 16


def test_earlier_turns_are_part_of_the_prompt_until_a_new_conversation(page: Page, served: Served) -> None:
    put(served, page, *plain(1))
    for turn, question in enumerate(("What does it do?", "What does it do?"), start=1):
        page.ask(question, turns=turn)
    first, second = (int(text.split()[2]) for text in page.texts("figcaption"))
    assert second > first + 6, "the answer is there, too"
    page.click("#anew")
    assert page.texts(".turn") == []
    page.ask("What does it do?")
    assert page.texts("figcaption") == [f"Prompt of {first} tokens in 3 parts"]


def test_the_whole_way_by_keys_alone(page: Page, served: Served) -> None:
    tab = page.tab

    def go(to: str, shift: bool = False) -> None:
        for _ in range(60):
            if page.js(FOCUSED) == to:
                return
            tab.press("Tab", shift)
        raise AssertionError(f"no way to {to}; at {page.js(FOCUSED)}")

    def type_text(text: str) -> None:
        tab.send("Input.insertText", text=text)

    tab.press("Tab")
    assert page.js("document.activeElement.className") == "skip"
    tab.press("Enter")
    assert page.js("location.hash") == "#question"
    for id, text in (("a", "The bakery opens at six."), ("b", "Rye needs two days.")):
        page.js("document.activeElement.blur()")
        if not page.js("document.querySelector('#documents details').open"):
            page.js("document.getElementById('files').focus()")
            tab.press("Tab")
            tab.press("Enter")
        go("paste-id")
        type_text(id)
        go("paste-text")
        type_text(text)
        tab.press("Tab")
        tab.press("Enter")
        page.ready(id)
    go("Move b up")
    tab.press("Enter")
    assert page.texts(CHOSEN) == ["b", "a"]
    assert page.js(FOCUSED) == "Move b down", "at the end of the list only the other way is left"
    tab.press("Enter")
    assert (page.texts(CHOSEN), page.js(FOCUSED)) == (["a", "b"], "Move b up")
    go("question")
    tab.press("Enter")
    assert page.text("#ask-said") == "Write a question first."
    type_text("When?")
    go("method")
    while page.js("document.getElementById('method').value") != "none":
        tab.press("ArrowDown")
    go("length")
    type_text("3")
    go("question", shift=True)
    tab.press("Enter")
    page.until("document.querySelectorAll('.turn figure').length === 1")
    assert page.js(FOCUSED) == "question"
    page.js("document.getElementById('files').focus()")
    go("Delete b")
    tab.press("Enter")
    assert page.texts(CHOSEN) == ["a", "b"], "asked once more"
    assert page.js(FOCUSED) == "Really delete b?"
    tab.press("Enter")
    page.until("document.getElementById('library').children.length === 1")
    assert (page.texts(CHOSEN), page.js(FOCUSED)) == (["a"], "Delete a")
    assert [each["id"] for each in served.http().get("/v1/documents").json()["data"]] == ["a"]


def test_what_is_focused_can_be_seen(page: Page) -> None:
    page.tab.press("Tab")
    style = "getComputedStyle(document.activeElement)"
    assert page.js(f"[{style}.outlineStyle, parseFloat({style}.outlineWidth) >= 2]") == ["solid", True]
    assert page.js("document.activeElement.getBoundingClientRect().left >= 0")


def test_markup_in_ids_titles_questions_and_answers_is_text(
    page: Page, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvquilt.decode import Detokeniser

    monkeypatch.setattr(Detokeniser, "push", lambda self, token: HOSTILE)
    monkeypatch.setattr(Detokeniser, "flush", lambda self: "")
    put(served, page, {"id": HOSTILE, "title": f"{HOSTILE}!", "text": f"{HOSTILE} is a text."})
    page.ask(HOSTILE, "none", compare=True, length=2)
    page.js("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.text(".turn h3") == HOSTILE
    assert page.texts(".answer") == [HOSTILE * 2] * 2
    assert page.texts(CHOSEN) == page.texts("#library .name") == [f"{HOSTILE}! ({HOSTILE})"]
    assert f"{HOSTILE}! ({HOSTILE})" in page.text(".turn table")
    page.click("#library button")
    page.click("#library button")
    page.until("document.getElementById('library').children.length === 0")
    assert page.js("[document.images.length, window.taken === undefined]") == [0, True]
    raised = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'taken'; } catch (e) { return e.name; } })()"
    assert page.js(raised) == "TypeError", "the page's policy lets nobody make markup of text"


def test_stop_ends_the_answer_and_gives_everything_back(
    page: Page, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, step = threading.Event(), Steps.step

    def stepped(self: Steps, *args: Any) -> Any:
        assert go.wait(0.05) or True
        return step(self, *args)

    monkeypatch.setattr(Steps, "step", stepped)
    put(served, page, *plain(1))
    page.choose("method", "none")
    page.fill("length", "300")
    page.fill("question", "What?")
    page.click("#go")
    page.until("document.querySelector('.answer')?.innerText.length > 0")
    assert page.js("[document.getElementById('turns').ariaBusy, document.getElementById('go').disabled]") == [
        "true",
        True,
    ]
    page.click("#stop")
    page.until("document.querySelector('.side .note').innerText === 'Stopped.'")
    go.set()
    served.rests()
    assert page.text("#ask-said") == ""
    page.ask("What?", turns=2)


def test_what_the_server_refuses_is_said_in_its_words(page: Page, served: Served) -> None:
    put(served, page, *plain(1))
    page.choose("method", "none")
    page.fill("length", "5000")
    page.fill("question", "What?")
    page.click("#go")
    page.until("document.getElementById('ask-said').innerText")
    assert "tokens" in page.text("#ask-said")
    gap = "document.getElementById('ask-said').getBoundingClientRect().top"
    gap += " - document.getElementById('question').getBoundingClientRect().bottom"
    assert 0 <= page.js(gap) < 20, "it stands by the box that was asked with"
    assert page.text(".side .note") == "Failed."
    assert page.js("document.getElementById('question').value") == "What?", "it may be asked again"
    page.js("{ const f = document.getElementById('paste-text'); f.value = '\\ud800'; f.form.requestSubmit(); }")
    page.until("document.getElementById('documents-trouble').innerText.startsWith('the text: ')")


def test_a_document_that_cannot_be_compiled_says_why(page: Page, served: Served) -> None:
    served.http().post("/v1/documents", json={"id": "long", "text": "word " * 3000})
    page.reload()
    page.until("document.querySelector('#library .state.failed')")
    assert "tokens" in page.text("#library .state.failed")
    assert page.texts(CHOSEN) == [], "no prompt can have it"
    assert page.js("document.querySelector('#library input').disabled")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_told_by_colour_alone_and_all_texts_stand_out(page: Page, served: Served, scheme: str) -> None:
    from tests.evaluation.report.test_browser import contrast

    page.tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    put(served, page, *plain(3))
    page.ask("What does it do?", "epic", compare=True)
    leave_picture(page, f"-{scheme}")
    ground = page.js("getComputedStyle(document.body).backgroundColor")
    soft = "getComputedStyle(document.querySelector({!r})).color"
    for each in ("body", ".note", "#library .state", ".answer", ".number", "h4"):
        assert contrast(page.js(soft.format(each)), ground) >= 4.5, each
    look = "['exact', 'reused', 'recomputed', 'inline']"
    look += ".map(kind => getComputedStyle(document.querySelector('.strip .' + kind)))"
    patterns = page.js(f"{look}.map(style => style.backgroundImage.replace(/rgb[^)]*\\)/g, ''))")
    assert len(set(patterns)) == 4, "each has a pattern of its own, or none"
    assert len(set(page.js(f"{look}.map(style => style.backgroundColor)"))) == 4
    assert page.texts(".strip .number")[:5] == ["1", "2", "3", "4", "5"]


def test_a_narrow_screen_scrolls_nothing_but_tables(page: Page, served: Served) -> None:
    put(served, page, *plain(3), {"id": "x" * 300, "title": "y" * 200, "text": "Rye."})
    page.ask("z" * 200, "epic", compare=True)
    page.tab.size(375, 800)
    page.js("document.querySelectorAll('details').forEach(each => each.open = true)")
    leave_picture(page, "-375")
    assert page.js("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    over = "[...document.querySelectorAll('button, input, select, textarea, .strip, .answer')]"
    over += ".filter(e => e.getBoundingClientRect().right > 375).map(e => e.outerHTML)"
    assert page.js(over) == []


def test_every_control_and_landmark_has_a_name(page: Page, served: Served) -> None:
    put(served, page, *plain(2))
    page.ask("What does it do?", "none", compare=True)
    page.js("document.querySelectorAll('details').forEach(each => each.open = true)")
    page.tab.send("Accessibility.enable")
    nodes = page.tab.send("Accessibility.getFullAXTree")["nodes"]
    shown = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    kinds = {"button", "textbox", "checkbox", "switch", "combobox", "spinbutton", "region", "image", "log", "table"}
    found = [(role, name) for role, name in shown if role in kinds]
    assert {role for role, _ in found} >= kinds - {"textbox"}
    assert [role for role, name in found if not name.strip()] == []
    assert {"main", "banner"} <= {role for role, _ in shown}
    names = [name for role, name in found if role == "button"]
    assert len(names) == len(set(names)), "two buttons of one name cannot be told apart"
    drawn = next(name for role, name in found if role == "image" and name.startswith("Prompt of "))
    assert "reused" in drawn
    levels = page.js(
        "[...document.querySelectorAll('h1, h2, h3, h4')].filter(h => h.checkVisibility()).map(h => +h.tagName[1])"
    )
    assert levels[0] == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
