"""Exercises from a JSONL file: ``{"documents": [...], "question": ...}`` a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.lines import given_documents, given_text, given_texts, read_lines
from kvquilt.training.exercise import Exercise


def read_exercises(path: Path) -> list[Exercise]:
    """One exercise a line.

    ``documents``: texts, or objects with ``text`` and, if wanted, ``id``. ``question``, a text, or ``questions``,
    several. Other fields, such as answers, are not looked at: the model's own answers teach.

    Raises:
        InputError: names line and field; also a file that cannot be read or holds nothing.
    """
    form = 'must be an object: {"documents": [...], "question": ...}'
    return [_exercise(data, where) for where, data in read_lines("data", path, form)]


def _exercise(data: dict[str, Any], where: str) -> Exercise:
    documents = given_documents(data, where)
    if ("question" in data) == ("questions" in data):
        raise InputError(f"{where}: question", "either question, a text, or questions, a list of texts, is needed")
    several = "questions" in data
    asked = given_texts(data, "questions", where) if several else (given_text(data, "question", where),)
    try:
        return Exercise(documents, asked)
    except InputError as error:
        raise InputError(f"{where}: {error.field}", error.rule, error.got) from None
