"""Reading folders and splitting files: nothing is lost, nothing stops the reading, every omission has a reason."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pypdf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.document import check_documents
from kvquilt.errors import InputError
from kvquilt.passages import Skipped, SourceFile, read_folder, read_passages, split
from kvquilt.sections import html_text

MARKDOWN = """Before any heading.

# Guide

Intro.

## Install #

Run it.

```sh
# not a heading
make
```

Empty
-----

## Use

First.

Second.

# Other

Bye.
"""

RST = """=====
Title
=====

Words.

Part one
--------

Alpha.

Deep
~~~~

Beta.

Part two
--------

Gamma::

   code
"""


def texts(name: str, content: str, **options: int) -> list[str]:
    file = SourceFile(name, content, Path(name).suffix)
    return [document.text for document in split(file, **options)]


def test_markdown_passages_carry_the_titles_above_them() -> None:
    assert texts("a.md", MARKDOWN) == [
        "Before any heading.",
        "Guide\n\nIntro.",
        "Guide > Install\n\nRun it.\n\n```sh\n# not a heading\nmake\n```",
        "Guide > Use\n\nFirst.\n\nSecond.",
        "Other\n\nBye.",
    ]


def test_rst_levels_follow_the_order_of_styles() -> None:
    assert texts("a.rst", RST) == [
        "Title\n\nWords.",
        "Title > Part one\n\nAlpha.",
        "Title > Part one > Deep\n\nBeta.",
        "Title > Part two\n\nGamma::\n\n   code",
    ]


def test_a_table_or_rule_is_no_heading() -> None:
    assert texts("a.md", "| a | b |\n---\n\ntwo lines\nhere\n---\n\n---\n\n- x\n---\n") == [
        "| a | b |\n---\n\ntwo lines\nhere\n---\n\n---\n\n- x\n---"
    ]
    assert texts("a.rst", "a\n\n+---+\n| x |\n+---+\n\n=== ===\nA   B\n=== ===\n") == [
        "a\n\n+---+\n| x |\n+---+\n\n=== ===\nA   B\n=== ==="
    ]


def test_headings_alone_are_still_a_passage() -> None:
    assert texts("a.md", "# Only a title\n") == ["# Only a title"]


def test_python_splits_at_top_level_definitions() -> None:
    source = (
        '"""Doc."""\n\nimport os\n\n\n# about f\n@cache\ndef f():\n    return 1\n\n\nX = 2\n\n\n'
        "class C:\n    def m(self):\n        pass\n"
    )
    assert texts("pkg/m.py", source) == [
        '# pkg/m.py\n\n"""Doc."""\n\nimport os',
        "# pkg/m.py: f\n\n# about f\n@cache\ndef f():\n    return 1",
        "# pkg/m.py\n\nX = 2",
        "# pkg/m.py: C\n\nclass C:\n    def m(self):\n        pass",
    ]


def test_python_that_does_not_parse_is_cut_at_paragraphs() -> None:
    assert texts("m.py", "def (:\n    a\n\n    b\n", limit=18) == [
        "# m.py\n\ndef (:",
        "# m.py\n\n    a",
        "# m.py\n\n    b",
    ]
    assert texts("m.py", "x = '\\d'\n") == ["# m.py\n\nx = '\\d'"]


def test_html_keeps_headings_and_text_and_drops_scripts() -> None:
    page = (
        "<!doctype html><title>T</title><style>p{}</style><script>if (a<b) evil()</script><h1>Top<a>¶</a></h1>"
        "<p>One\n  two <b>bold</b>&amp; more<br>line</p><h2>Sub</h2><ul><li>x<li>y</ul>"
        "<pre># code\n   indented</pre><noscript>no</noscript><table><tr><td>1<td>2</table>end"
    )
    assert html_text(page) == (
        "# Top\n\nOne two bold& more\nline\n\n## Sub\n\n- x\n- y\n\n```\n# code\n   indented\n```\n\n1 2\n\nend"
    )


@pytest.mark.parametrize("limit", [1, 7, 40, 200])
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    st.lists(
        st.sampled_from(
            ["word ", "Sentence one. ", "日本語です。", "🙂", "\n", "\n\n", "x" * 50, "    indented", "\t"]
        ),
        max_size=20,
    ).map("".join)
)
def test_passages_keep_to_the_limit_and_lose_no_word(limit: int, text: str) -> None:
    for name in ("a.txt", "a.py"):
        found = texts(name, text, limit=limit)
        bodies = [t.removeprefix("# a.py\n\n") for t in found]
        assert all(len(t) <= limit for t in found)
        assert "".join("".join(bodies).split()) == "".join(text.split())


def test_long_paragraphs_are_cut_at_sentences_then_words() -> None:
    assert texts("a.txt", "One two. Three four! Five six.", limit=21) == ["One two. Three four!", "Five six."]
    assert texts("a.txt", "alpha beta gamma delta", limit=11) == ["alpha beta", "gamma delta"]
    assert texts("a.txt", "今日は。明日は。", limit=4) == ["今日は。", "明日は。"]


def test_a_title_that_leaves_no_room_is_shortened_or_left_out() -> None:
    text = f"# {'long ' * 10}\n\n## Short\n\nbody one.\n\n### {'long ' * 10}\n\nbody two."
    assert texts("a.md", text, limit=30) == ["Short\n\nbody one.", "body two."]


def test_the_limit_may_be_in_tokens() -> None:
    file = SourceFile("a.txt", "a b c d e f g", ".txt")
    found = split(file, limit=3, length=lambda text: len(text.split()))
    assert [d.text for d in found] == ["a b c", "d e f", "g"]
    assert [d.id for d in found] == ["a.txt#1", "a.txt#2", "a.txt#3"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "docs"
    (root / "sub").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "b.md").write_text("# B\n\nText b.\n")
    (root / "a.txt").write_bytes("\ufeffText a.\r\nLine.".encode())
    (root / "sub" / "c.HTM").write_text("<p>Text c.</p>")
    (root / "sub" / "copy.txt").write_text("Text a.\nLine.\n")
    (root / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (root / "binary.txt").write_bytes(b"text\x00more")
    (root / "empty.md").write_text(" \n")
    (root / ".hidden" / "x.md").write_text("hidden")
    (root / ".x.md").write_text("hidden")
    (root / "data.csv").write_text("1,2")
    (root / "broken.md").symlink_to(root / "nowhere.md")
    (root / "sub" / "loop").symlink_to(root, target_is_directory=True)
    os.mkfifo(root / "pipe.txt")
    return root


def test_a_folder_is_read_in_order_and_says_what_it_left_out(folder: Path) -> None:
    found = read_passages(folder)
    assert [(d.id, d.text) for d in found.documents] == [
        ("a.txt#1", "Text a.\nLine."),
        ("b.md#1", "B\n\nText b."),
        ("sub/c.HTM#1", "Text c."),
    ]
    assert found.duplicates == 1
    assert {s.path: s.reason for s in found.skipped} == {
        "binary.txt": "binary: it has NUL bytes",
        "broken.md": "unreadable: No such file or directory",
        "empty.md": "empty",
        "latin.txt": "not UTF-8 (at byte 3)",
        "pipe.txt": "not a regular file",
        "sub/loop": "link to a folder",
    }
    assert read_passages(folder) == found
    check_documents(found.documents)


def test_an_unreadable_file_or_folder_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    files, skipped = read_folder(folder)
    assert files == []
    assert Skipped("a.txt", "unreadable: Permission denied") in skipped

    def refuse_listing(path: str) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", refuse_listing)
    assert read_folder(folder) == ([], [Skipped(".", "unreadable: Permission denied")])


def test_formats_can_be_chosen_and_a_single_file_read(folder: Path) -> None:
    assert [f.path for f in read_folder(folder, formats=[".md"])[0]] == ["b.md"]
    assert [d.id for d in read_passages(folder / "b.md").documents] == ["b.md#1"]
    assert [d.id for d in read_passages(str(folder / "sub" / "c.HTM")).documents] == ["c.HTM#1"]


@pytest.mark.parametrize(
    ("path", "options", "field"),
    [
        ("nowhere", {}, "path"),
        ("data.csv", {}, "path"),
        ("b.md", {"formats": [".txt"]}, "path"),
        (".", {"formats": [".markdwn"]}, "formats"),
        (".", {"formats": ["md"]}, "formats"),
        (".", {"limit": 0}, "limit"),
        (".", {"limit": 2.5}, "limit"),
    ],
)
def test_malformed_requests_are_named(folder: Path, path: str, options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as raised:
        read_passages(folder / path, **options)  # type: ignore[arg-type]
    assert raised.value.field == field


def write_pdf(path: Path, text: str, password: str | None = None) -> None:
    writer = pypdf.PdfWriter()
    page = writer.add_blank_page(200, 200)
    font = pypdf.generic.DictionaryObject()
    for name, value in (("Type", "Font"), ("Subtype", "Type1"), ("BaseFont", "Helvetica")):
        font[pypdf.generic.NameObject(f"/{name}")] = pypdf.generic.NameObject(f"/{value}")
    fonts = pypdf.generic.DictionaryObject({pypdf.generic.NameObject("/F1"): font})
    page[pypdf.generic.NameObject("/Resources")] = pypdf.generic.DictionaryObject(
        {pypdf.generic.NameObject("/Font"): fonts}
    )
    content = pypdf.generic.StreamObject()
    content.set_data(f"BT /F1 12 Tf 10 100 Td ({text}) Tj ET".encode())
    page[pypdf.generic.NameObject("/Contents")] = writer._add_object(content)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)


def test_pdf_text_is_read_and_damaged_files_are_skipped(tmp_path: Path) -> None:
    write_pdf(tmp_path / "good.pdf", "Hello from a page.")
    write_pdf(tmp_path / "locked.pdf", "Secret.", password="x")
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    (tmp_path / "none.pdf").write_bytes(b"")
    found = read_passages(tmp_path)
    assert [(d.id, d.text) for d in found.documents] == [("good.pdf#1", "Hello from a page.")]
    assert [s.path for s in found.skipped] == ["bad.pdf", "locked.pdf", "none.pdf"]
    assert found.skipped[0].reason.startswith("damaged PDF")
    assert found.skipped[1].reason == "encrypted PDF"


def test_a_pdf_without_the_extra_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "a.md").write_text("x")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(InputError, match=r"kvquilt\[pdf\]"):
        read_folder(tmp_path)
    assert [f.path for f in read_folder(tmp_path, formats=[".md"])[0]] == ["a.md"]


def test_file_names_that_are_not_utf8_get_a_readable_id(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.md")).write_text("x")
    assert [d.id for d in read_passages(tmp_path).documents] == ["caf\ufffd.md#1"]


def test_malformed_html_does_not_stop_the_reading(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<p>ok<![foo[ <b")
    (tmp_path / "b.html").write_text("<p>fine")
    found = read_passages(tmp_path)
    assert "fine" in [d.text for d in found.documents]
    assert len(found.documents) + len(found.skipped) == 2
