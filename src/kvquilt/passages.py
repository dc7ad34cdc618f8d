"""Passages: the documents that a folder of files is split into.

`read_folder` reads files to text and says which it skipped and why; `split` cuts a text at headings, then at
paragraphs, to a size limit; `read_passages` does both. Same folder, same passages, in the same order.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvquilt.document import Document
from kvquilt.errors import InputError, nearest
from kvquilt.sections import Section, html_text, sections

FORMATS = (".txt", ".md", ".rst", ".html", ".py", ".pdf")
DEFAULT_LIMIT = 1600

# A text is cut at the first of these that yields pieces below the limit. Every pattern matches all of a text, so that
# the pieces, joined, are the text.
_SENTENCE = r".+?(?:[.!?]+[\"')\]]*\s+|[。！？]+|\Z)"
_LEVELS = [re.compile(p, re.DOTALL) for p in (r".+?(?:\n(?:[^\S\n]*\n)+|\Z)", _SENTENCE, r"\s*\S+\s*|\s+", r".")]
_CODE_LEVELS = [_LEVELS[0], re.compile(r"[^\n]*\n|[^\n]+"), *_LEVELS[2:]]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that was read.

    Attributes:
        path: relative to the folder, with ``/``.
        text: what it says: a web page has become text with ``#`` headings, a PDF the text of its pages.
        format: its suffix in lower case, as in `FORMATS`.
    """

    path: str
    text: str = field(repr=False)
    format: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file or folder that was not read, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Passages:
    """What a folder became. `duplicates` counts passages left out because an earlier one has the same text."""

    documents: tuple[Document, ...]
    files: tuple[SourceFile, ...]
    skipped: tuple[Skipped, ...]
    duplicates: int


def read_passages(
    path: str | Path,
    *,
    formats: Collection[str] = FORMATS,
    limit: int = DEFAULT_LIMIT,
    length: Callable[[str], int] = len,
) -> Passages:
    """All passages of a folder or file, each text once; see `read_folder` and `split`."""
    files, skipped = read_folder(path, formats=formats)
    found = [document for file in files for document in split(file, limit=limit, length=length)]
    first: dict[str, Document] = {}
    for document in found:
        first.setdefault(document.text, document)
    return Passages(tuple(first.values()), tuple(files), tuple(skipped), len(found) - len(first))


def read_folder(path: str | Path, *, formats: Collection[str] = FORMATS) -> tuple[list[SourceFile], list[Skipped]]:
    """Every file of the given formats below a folder (or that one file), ordered by path.

    Hidden files and folders are ignored, and so are files of other formats. Links to folders are not followed, so a
    loop cannot trap it. A file that is empty, binary, not UTF-8, damaged or unreadable is skipped with the reason.

    Raises:
        InputError: no such path; an unknown format; a PDF is there and the extra ``kvquilt[pdf]`` is not installed.
    """
    for name in formats:
        if name not in FORMATS:
            raise InputError("formats", f"must be among {', '.join(FORMATS)}{nearest(str(name), FORMATS)}", name)
    root = Path(path)
    try:
        is_folder = stat.S_ISDIR(root.stat().st_mode)
    except (OSError, ValueError) as error:
        raise InputError("path", f"must be a folder or file that can be read: {error}", str(path)) from error
    if not is_folder and _format(root) not in formats:
        raise InputError("path", f"must be a folder or a file in one of {', '.join(sorted(formats))}", str(path))
    files: list[SourceFile] = []
    skipped: list[Skipped] = []
    base = root if is_folder else root.parent
    walk = _walk(root, base, skipped) if is_folder else iter([root])
    for file in walk:
        if (suffix := _format(file)) not in formats:
            continue
        name = _relative(file, base)
        try:
            text = _read(file, suffix)
            if not text.strip():
                raise _UnreadableError("empty")
            files.append(SourceFile(name, text, suffix))
        except _UnreadableError as refusal:
            skipped.append(Skipped(name, str(refusal)))
    return sorted(files, key=lambda f: f.path), sorted(skipped, key=lambda s: s.path)


def split(file: SourceFile, *, limit: int = DEFAULT_LIMIT, length: Callable[[str], int] = len) -> list[Document]:
    """The file's passages, in order; a passage's id is ``path#k`` with `k` counted from 1.

    A passage never spans two sections and begins with the titles above it, so that it can be read alone. Sections
    above the limit are cut at paragraphs, sentences (lines in code), words, and at last anywhere.

    Args:
        limit: the most that a passage may measure, its titles included.
        length: measures a text; characters by default. Joined texts may measure at most the sum of their parts, as
            token counts do in practice.

    Raises:
        InputError: a limit below 1.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InputError("limit", "must be an integer of at least 1", limit)
    levels = _CODE_LEVELS if file.format == ".py" else _LEVELS
    texts = [
        text
        for section in sections(file.path, file.text, file.format)
        for text in _passages(section, limit, length, levels)
    ]
    return [Document(text, id=f"{file.path}#{k}") for k, text in enumerate(texts, start=1)]


def _passages(
    section: Section, limit: int, length: Callable[[str], int], levels: list[re.Pattern[str]]
) -> Iterator[str]:
    heads = [f"{title}\n\n" for title in (section.title, section.title.rpartition(" > ")[2]) if title]
    head = next((head for head in heads if length(head) <= limit // 2), "")  # titles must leave room for the text
    room = limit - length(head)
    for body in _pack(section.body.strip("\n").rstrip(), room, length, levels):
        if body.strip():
            yield head + body.strip("\n").rstrip()


def _pack(text: str, limit: int, length: Callable[[str], int], levels: list[re.Pattern[str]]) -> Iterator[str]:
    """Cut `text` into pieces of at most `limit`, filled greedily; joined they are the text."""
    if length(text) <= limit or not levels:
        yield text
        return
    held, size = "", 0
    for unit in levels[0].findall(text):
        measured = length(unit)
        if held and size + measured > limit:
            yield held
            held, size = "", 0
        if measured > limit:
            *whole, held = _pack(unit, limit, length, levels[1:])
            yield from whole
            size = length(held)
        else:
            held, size = held + unit, size + measured
    if held:
        yield held


def _walk(root: Path, base: Path, skipped: list[Skipped]) -> Iterator[Path]:
    def failed(error: OSError) -> None:
        skipped.append(Skipped(_relative(Path(str(error.filename)), base), f"unreadable: {error.strerror}"))

    for folder, below, names in os.walk(root, onerror=failed):
        here = Path(folder)
        for name in sorted(below):
            if not name.startswith(".") and (here / name).is_symlink():
                skipped.append(Skipped(_relative(here / name, base), "link to a folder"))
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield from (here / name for name in sorted(names) if not name.startswith("."))


def _format(path: Path) -> str:
    suffix = path.suffix.lower()
    return {".htm": ".html", ".markdown": ".md"}.get(suffix, suffix)


def _relative(path: Path, base: Path) -> str:
    """The path with ``/``; bytes of a file name that are not UTF-8 become ``\ufffd``."""
    relative = path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()
    return os.fsencode(relative).decode("utf-8", "replace")


class _UnreadableError(Exception):
    """Why a file has no text to give."""


def _read(path: Path, suffix: str) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _UnreadableError("not a regular file")
        if suffix == ".pdf":
            return _read_pdf(path)
        raw = path.read_bytes()
    except OSError as error:
        raise _UnreadableError(f"unreadable: {error.strerror or type(error).__name__}") from error
    if b"\x00" in raw:
        raise _UnreadableError("binary: it has NUL bytes")
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        return html_text(text) if suffix == ".html" else text
    except UnicodeDecodeError as error:
        raise _UnreadableError(f"not UTF-8 (at byte {error.start})") from None
    except AssertionError:  # html.parser on a malformed declaration
        raise _UnreadableError("damaged HTML") from None


def _read_pdf(path: Path) -> str:
    try:
        import pypdf
    except ImportError:
        rule = "reading PDF needs the extra kvquilt[pdf]: pip install 'kvquilt[pdf]', or leave '.pdf' out"
        raise InputError("formats", rule, path.name) from None
    try:
        with path.open("rb") as stream:
            reader = pypdf.PdfReader(stream)
            if reader.is_encrypted:
                raise _UnreadableError("encrypted PDF")
            text = "\n\n".join(page.extract_text() for page in reader.pages)
    except (OSError, _UnreadableError):
        raise
    except Exception as error:  # a damaged PDF raises whatever its parser stumbles over
        raise _UnreadableError(f"damaged PDF: {type(error).__name__}") from error
    return text.replace("\x00", "").encode("utf-8", "replace").decode()
