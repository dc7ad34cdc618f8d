"""Tasks by name: ``NAME``, or ``NAME:OPTION,OPTION``, an option being ``field=value`` or the path of the task's file.

``biography``, ``niah:kind=multikey,documents=8``, ``hotpotqa:dev.json,documents=5``. A path that has ``=`` in it is
written ``path=...``; one with a comma can only be given to the task's class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvquilt.errors import InputError, nearest
from kvquilt.evaluation.tasks.api_docs import ApiDocsTask
from kvquilt.evaluation.tasks.biography import BiographyTask
from kvquilt.evaluation.tasks.dialogue import DialogueTask
from kvquilt.evaluation.tasks.hotpotqa_task import HotpotQATask
from kvquilt.evaluation.tasks.jsonl import JsonlTask
from kvquilt.evaluation.tasks.musique import MusiqueTask
from kvquilt.evaluation.tasks.niah import NeedleTask
from kvquilt.evaluation.tasks.squad import SquadTask
from kvquilt.evaluation.tasks.task import Task
from kvquilt.repair.written import split, value_like

TASKS: dict[str, type[Task]] = {
    "biography": BiographyTask,
    "niah": NeedleTask,
    "api_docs": ApiDocsTask,
    "hotpotqa": HotpotQATask,
    "musique": MusiqueTask,
    "squad": SquadTask,
    "dialogue": DialogueTask,
    "jsonl": JsonlTask,
}


def find_task(written: object, **parts: Callable[..., Any]) -> Task:
    """The task that `written` describes.

    Args:
        parts: functions that no text can name, ``length`` (measures a text in tokens) and ``retriever``; a task without
            a field of that name has no use for it and is made without.

    Raises:
        InputError: unknown name or option, the nearest in the message; a file missing; whatever the task refuses.
    """
    if not isinstance(written, str):
        raise InputError("task", f"unknown task{nearest(written, TASKS)}", written)
    name, options = split(written)
    if name not in TASKS:
        file = name.endswith((".json", ".jsonl"))
        hint = f"; a file stands behind its form, as in jsonl:{name}" if file else nearest(name, TASKS)
        raise InputError("task", f"unknown task{hint}", name)
    task: Any = TASKS[name]
    fields = {f.name: f for f in dataclasses.fields(task) if f.init}
    unknown = set(parts) - {"length", "retriever"}
    if unknown:
        raise InputError("task", f"no such part{nearest(min(unknown), ('length', 'retriever'))}", min(unknown))
    given: dict[str, Any] = {part: value for part, value in parts.items() if part in fields}
    settings = {field: f.default for field, f in fields.items() if _is_written(f)}
    for option in options:
        field, value = _option(name, option, settings)
        if field in given:
            raise InputError("task", f"{field} is given twice", written)
        given[field] = value
    if "path" in fields and "path" not in given:
        raise InputError("task", f"needs a file: {name}:PATH", written)
    made: Task = task(**given)
    return made


def _option(name: str, option: str, settings: dict[str, Any]) -> tuple[str, object]:
    field, equals, value = (part.strip() for part in option.partition("="))
    if not equals:
        if "path" in settings:
            return "path", option
        raise InputError("task", f"an option of {name} is written field=value", option)
    if field not in settings:
        raise InputError("task", f"{name} has no option {field!r}{nearest(field, settings)}")
    if settings[field] is dataclasses.MISSING:
        return field, value
    try:
        return field, value_like(settings[field], field, value)
    except InputError as error:  # that one speaks of methods
        rule = error.rule if error.field == "method" else f"{error.field}: {error.rule}"
        raise InputError("task", rule, error.got) from None


def _is_written(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING or isinstance(field.default, bool | int | float | str)
