"""Exercises from a JSONL file: ``{"documents": [...], "question": ...}`` a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.training.exercise import Exercise


def read_exercises(path: Path) -> list[Exercise]:
    """One exercise a line.

    ``documents``: texts, or objects with ``text`` and, if wanted, ``id``. ``question``, a text, or ``questions``,
    several. Other fields, such as answers, are not looked at: the model's own answers teach.

    Raises:
        InputError: names line and field; also a file that cannot be read or holds nothing.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("data", f"the file cannot be read: {error}", str(path)) from None
    found = [_exercise(line, f"line {n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise InputError("data", "the file holds no line", str(path))
    return found


def _exercise(line: str, where: str) -> Exercise:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise InputError(where, 'must be an object: {"documents": [...], "question": ...}')
    given = data.get("documents")
    if not isinstance(given, list) or not given:
        raise InputError(f"{where}: documents", "must be a list of at least one document", type(given).__name__)
    if ("question" in data) == ("questions" in data):
        raise InputError(f"{where}: question", "either question, a text, or questions, a list of texts, is needed")
    asked = [data["question"]] if "question" in data else data["questions"]
    if not isinstance(asked, list):
        raise InputError(f"{where}: questions", "must be a list of texts", type(asked).__name__)
    documents = tuple(_document(each, n, f"{where}: documents[{n}]") for n, each in enumerate(given))
    try:
        return Exercise(documents, tuple(asked))
    except InputError as error:
        raise InputError(f"{where}: {error.field}", error.rule, error.got) from None


def _document(given: Any, index: int, where: str) -> Document:
    fields = {"text": given} if isinstance(given, str) else given
    if not isinstance(fields, dict) or "text" not in fields:
        raise InputError(where, "must be a text, or an object with text", type(given).__name__)
    try:
        return Document(fields["text"], id=fields.get("id", f"document-{index + 1}"))
    except InputError as error:
        raise InputError(f"{where}.{error.field.removeprefix('Document.')}", error.rule, error.got) from None
