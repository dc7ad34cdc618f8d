"""Sections of a file: a title that stands above, and the text below it."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser

_FENCE = re.compile(r"\s{0,3}(```|~~~)")
_HASHES = re.compile(r"\s{0,3}(#{1,6})[ \t]+(.+?)[ \t]*#*[ \t]*$")
_UNDERLINE = re.compile(r"([=\-~^\"'`*+#.:_])\1{2,}[ \t]*$")
_SETEXT = {"=": 1, "-": 2}


@dataclass(frozen=True, slots=True)
class Section:
    """Text under one heading. `title` is the headings above it, joined by `` > ``; empty where there is none."""

    title: str
    body: str


def sections(path: str, text: str, form: str) -> list[Section]:
    """A file's sections in order. Headings without text are dropped, unless the file has nothing else.

    Args:
        path: names the file in the titles of source code.
        form: its suffix; ``.html`` stands for what `html_text` made of it.
    """
    if form == ".py":
        return _python(path, text)
    if form in (".txt", ".pdf"):
        return [Section("", text)]
    found = _under_headings(text, _rst_headings if form == ".rst" else _markdown_headings)
    return [section for section in found if section.body.strip()] or [Section("", text)]


@dataclass(frozen=True, slots=True)
class _Heading:
    """A heading of the lines ``first .. last``; level 1 is the highest."""

    first: int
    last: int
    level: int
    title: str


def _under_headings(text: str, find: Callable[[list[str]], Iterator[_Heading]]) -> Iterator[Section]:
    lines = text.split("\n")
    above: list[_Heading] = []
    start = 0
    for heading in find(lines):
        yield Section(_joined(above), "\n".join(lines[start : heading.first]))
        above = [*(h for h in above if h.level < heading.level), heading]
        start = heading.last + 1
    yield Section(_joined(above), "\n".join(lines[start:]))


def _joined(headings: list[_Heading]) -> str:
    return " > ".join(heading.title for heading in headings)


def _markdown_headings(lines: list[str]) -> Iterator[_Heading]:
    fence = ""
    for n, line in enumerate(lines):
        mark = _FENCE.match(line)
        if mark and (not fence or fence == mark.group(1)):
            fence = "" if fence else mark.group(1)
        elif fence:
            continue
        elif match := _HASHES.match(line):
            yield _Heading(n, n, len(match.group(1)), match.group(2))
        elif n and (under := re.fullmatch(r"(=+|-+)[ \t]*", line)) and _is_title(lines, n - 1):
            yield _Heading(n - 1, n, _SETEXT[under.group(1)[0]], lines[n - 1].strip())


def _is_title(lines: list[str], n: int) -> bool:
    """Whether line `n` is a one-line paragraph that an underline makes a heading, not a table row or list."""
    line = lines[n]
    alone = n == 0 or not lines[n - 1].strip()
    return alone and bool(line.strip()) and not line.startswith(("    ", "|", ">", "- ", "* ", "#", "---", "\t"))


def _rst_headings(lines: list[str]) -> Iterator[_Heading]:
    """Underlined lines; the level of a style is the order in which the styles first occur."""
    styles: list[tuple[str, bool]] = []
    for n in range(1, len(lines)):
        under, title = _UNDERLINE.match(lines[n]), lines[n - 1]
        if not under or not title.strip() or _UNDERLINE.match(title) or len(lines[n].rstrip()) < len(title.strip()):
            continue
        over = n >= 2 and lines[n - 2].rstrip() == lines[n].rstrip()
        if title[0].isspace() and not over:
            continue
        first = n - 2 if over else n - 1
        if first and lines[first - 1].strip():
            continue
        style = (under.group(1), over)
        if style not in styles:
            styles.append(style)
        yield _Heading(first, n, styles.index(style) + 1, title.strip())


def _python(path: str, text: str) -> list[Section]:
    """Top-level functions and classes, and what stands between them; paragraphs if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in someone's source are not ours to report
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [Section(f"# {path}", text)]
    lines = text.split("\n")
    found: list[Section] = []
    start = 0
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        while first > start and lines[first - 1].lstrip().startswith("#"):
            first -= 1
        last = node.end_lineno or node.lineno
        if first < start:  # a second statement on the same line
            continue
        found.append(Section(f"# {path}", "\n".join(lines[start:first])))
        found.append(Section(f"# {path}: {node.name}", "\n".join(lines[first:last])))
        start = last
    found.append(Section(f"# {path}", "\n".join(lines[start:])))
    return [section for section in found if section.body.strip()]


_DROPPED = {"script", "style", "template", "noscript", "svg", "title"}
_BLOCKS = {
    "address", "article", "aside", "blockquote", "body", "dd", "div", "dl", "dt", "fieldset", "figcaption", "figure",
    "footer", "form", "header", "hr", "html", "main", "nav", "ol", "p", "section", "table", "ul",
}  # fmt: skip
_HEADING = re.compile("h[1-6]")
_LINES = {"br", "li", "tr"}


def html_text(source: str) -> str:
    """The readable text of a web page: ``#`` headings, paragraphs apart, no scripts, styles or attributes."""
    page = _Page()
    page.feed(source)
    page.close()
    return page.text()


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._out: list[str] = []
        self._dropped: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _DROPPED:
            self._dropped.append(tag)
        if self._dropped:
            return
        if _HEADING.fullmatch(tag):
            self._out.append(f"\n\n{'#' * int(tag[1])} ")
        elif tag == "pre":
            self._pre += 1
            self._out.append("\n\n```\n")  # a comment in it must not pass for a heading
        elif tag in _BLOCKS:
            self._out.append("\n\n")
        elif tag in _LINES:
            self._out.append("\n- " if tag == "li" else "\n")
        elif tag in ("td", "th") and self._out and not self._out[-1].endswith("\n"):
            self._out.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._dropped:
            del self._dropped[self._dropped.index(tag) :]
        elif self._dropped:
            return
        elif tag == "pre" and self._pre:
            self._pre -= 1
            self._out.append("\n```\n\n")
        elif tag in _BLOCKS or _HEADING.fullmatch(tag):
            self._out.append("\n\n")

    def handle_data(self, data: str) -> None:
        if self._dropped:
            return
        if not self._pre:
            data = re.sub(r"\s+", " ", data).replace("¶", "")  # the anchors of generated documentation
            if not self._out or self._out[-1].endswith(("\n", " ")):
                data = data.lstrip()
        if data:
            self._out.append(data)

    def text(self) -> str:
        joined = re.sub(r"[ \t]+\n", "\n", "".join(self._out))
        return re.sub(r"\n{3,}", "\n\n", joined).replace("\n\n```\n\n", "\n```\n\n").strip()
