"""The folder of a run: what it is a run of, what its items are, and a line for each item and arm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquilt.errors import IntegrityError, StoreUnavailableError
from kvquilt.evaluation.run.line_forms import check_begun, check_texts
from kvquilt.files import add_line, held, write_atomically, writing

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EvaluationFolder:
    """``run.json``, ``items.jsonl``, ``texts.jsonl`` and ``lines.jsonl``, which begins when the others are there.

    Questions and documents stand in ``texts.jsonl`` alone: the others, which hold accepted answers and what the arms
    answered, may be published without it.
    """

    path: Path

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def items(self) -> Path:
        return self.path / "items.jsonl"

    @property
    def texts(self) -> Path:
        return self.path / "texts.jsonl"

    @property
    def lines(self) -> Path:
        return self.path / "lines.jsonl"

    def held(self) -> AbstractContextManager[None]:
        """Nobody else runs into it meanwhile.

        Raises:
            InputError: somebody does.
            StoreUnavailableError: the folder cannot be written.
        """
        return held(self.path, "folder", "evaluates into")

    def write(
        self, run: Mapping[str, Any], items: Sequence[Mapping[str, Any]], texts: Sequence[Mapping[str, Any]]
    ) -> None:
        """What the run is, last: where it stands, its items do."""
        with writing(self.path):
            for path, each in ((self.items, items), (self.texts, texts)):
                write_atomically(path, "".join(json.dumps(one) + "\n" for one in each).encode())
            write_atomically(self.run, (json.dumps(run, indent=1) + "\n").encode())

    def read_run(self) -> dict[str, Any] | None:
        """None where there is none yet.

        Raises:
            IntegrityError: it is damaged.
            StoreUnavailableError: it is there and cannot be read, as of all that follows.
        """
        if (raw := bytes_of(self.run)) is None:
            return None
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{self.run}: not the description of a run") from error
        if not isinstance(found, dict):
            raise IntegrityError(f"{self.run}: not the description of a run")
        check_begun(self.run, found)
        return found

    def read_items(self) -> list[Line]:
        """Raises `IntegrityError`: damaged."""
        if (raw := bytes_of(self.items)) is None:
            raise IntegrityError(f"{self.items} is missing")
        return [_line(self.items, number, each) for number, each in enumerate(raw.splitlines(), start=1)]

    def read_texts(self) -> dict[str, Line]:
        """``question`` and ``documents`` (``id``, ``text``) by item; empty where the folder came without them.

        Raises:
            IntegrityError: damaged.
        """
        if (raw := bytes_of(self.texts)) is None:
            return {}
        read = [_line(self.texts, number, each) for number, each in enumerate(raw.splitlines(), start=1)]
        check_texts(self.texts, read)
        return {each["item"]: each for each in read}

    def read_lines(self) -> list[Line]:
        """All whole lines: one that is half written, as the last may be, does not count.

        Raises:
            IntegrityError: another one is damaged.
        """
        return list(self.each_line())

    def each_line(self) -> Iterator[Line]:
        """The same one by one: all of them together may be large."""
        if not self.lines.exists():
            return
        with _readable(self.lines), self.lines.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if raw.endswith(b"\n"):
                    yield _line(self.lines, number, raw)

    def count(self) -> int:
        """Whole lines, whatever they say."""
        return (bytes_of(self.lines) or b"").count(b"\n")

    def drop_half_line(self) -> None:
        """Cut off what stands behind the last whole line, so that the next one begins a line."""
        with writing(self.lines):
            whole = self.lines.read_bytes().rpartition(b"\n") if self.lines.exists() else (b"", b"", b"")
            if whole[2]:
                write_atomically(self.lines, whole[0] + whole[1])

    def keep(self, count: int) -> None:
        """Cut off the lines behind the first `count`."""
        with writing(self.lines):
            lines = self.lines.read_bytes().splitlines(keepends=True) if self.lines.exists() else []
            if len(lines) > count:
                write_atomically(self.lines, b"".join(lines[:count]))

    def add(self, line: Mapping[str, Any]) -> None:
        """One line more, on disk when this returns."""
        add_line(self.lines, line)


def bytes_of(path: Path) -> bytes | None:
    """What a file holds; None where there is none.

    Raises:
        StoreUnavailableError: it cannot be read.
    """
    with _readable(path):
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None


def by_item(lines: Iterable[Line]) -> dict[str, dict[str, Line]]:
    """Item -> arm -> line, in the lines' order."""
    found: dict[str, dict[str, Line]] = {}
    for line in lines:
        found.setdefault(line["item"], {})[line["method"]] = line
    return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailableError(f"{path} cannot be read: {error.strerror or error}") from error


def _line(path: Path, number: int, raw: bytes) -> Line:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: line {number} is damaged") from error
    if not isinstance(found, dict):
        raise IntegrityError(f"{path}: line {number} is damaged")
    return found
