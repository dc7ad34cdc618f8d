"""A JSONL file's objects and the documents in them; errors name the line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvquilt.document import Document
from kvquilt.errors import InputError

_NEARLY = 0.75  # of 1; two letters that changed places in a name of four


def read_lines(field: str, path: Path, form: str) -> list[tuple[str, dict[str, Any]]]:
    """``line N`` and its object, for every line that is not blank.

    Args:
        field: what names the file, for errors about all of it.
        form: the rule that a line breaks which is no object.

    Raises:
        InputError: names the line; also a file that cannot be read or holds nothing.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:  # also a name that no file can have
        raise InputError(field, f"the file cannot be read: {error}", str(path)) from None
    found = [(f"line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise InputError(field, "the file holds no line", str(path))
    return [(where, _object(line, where, form)) for where, line in found]


def given_documents(data: dict[str, Any], where: str) -> tuple[Document, ...]:
    """``documents`` of an object: texts, or objects with ``text`` and, if wanted, ``id`` (by default of the text).

    Raises:
        InputError: names line and field.
    """
    given = data.get("documents")
    if not isinstance(given, list) or not given:
        raise _broken(f"{where}: documents", "must be a list of at least one document", given)
    return tuple(_document(each, f"{where}: documents[{n}]") for n, each in enumerate(given))


def given_texts(data: dict[str, Any], field: str, where: str) -> tuple[str, ...]:
    """A list of texts by name.

    Raises:
        InputError: names line and field.
    """
    given = data.get(field)
    if not isinstance(given, list) or not given or not all(isinstance(each, str) and each.strip() for each in given):
        raise _broken(f"{where}: {field}", "must be a list of at least one text, none empty", given)
    return tuple(given)


def unread_fields(data: dict[str, Any], known: Iterable[str], where: str) -> list[str]:
    """Fields that nobody reads, in their order. ``meta``, an object, is for those, and none of them.

    Raises:
        InputError: names line and field: one that is nearly a known one, or a ``meta`` that is no object.
    """
    if not isinstance(data.get("meta", {}), dict):
        raise _broken(f"{where}: meta", "must be an object", data["meta"])
    by_name = {name.lower(): name for name in known}
    others = [name for name in data if name not in by_name.values() and name != "meta"]
    for name in others:
        if close := difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=_NEARLY):
            rule = f"unknown field; did you mean {by_name[close[0]]!r}? Fields of your own go into 'meta'"
            raise InputError(f"{where}: {name.encode(errors='backslashreplace').decode()}", rule)
    return others


def given_text(data: dict[str, Any], field: str, where: str, default: str | None = None) -> str:
    """A text by name; without a default it must be there.

    Raises:
        InputError: names line and field.
    """
    given = data.get(field, default)
    if not isinstance(given, str) or not given.strip():
        raise _broken(f"{where}: {field}", "must be a text that is not empty", given)
    return given


def _broken(field: str, rule: str, given: object) -> InputError:
    return InputError(field, f"is missing; {rule}") if given is None else InputError(field, rule, type(given).__name__)


def _object(line: str, where: str, form: str) -> dict[str, Any]:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise InputError(where, form)
    return data


def _document(given: Any, where: str) -> Document:
    fields = {"text": given} if isinstance(given, str) else given
    if not isinstance(fields, dict) or "text" not in fields:
        raise InputError(where, "must be a text, or an object with text", type(given).__name__)
    try:
        return Document(fields["text"], id=fields.get("id"))  # type: ignore[arg-type]  # None: of the text
    except InputError as error:
        raise InputError(f"{where}.{error.field.removeprefix('Document.')}", error.rule, error.got) from None
