"""What is measured once for each item, and not for each arm: a line for every item; what is there stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvquilt.errors import IntegrityError
from kvquilt.evaluation.run.folder import EvaluationFolder, Line
from kvquilt.evaluation.run.identity import begun
from kvquilt.evaluation.tasks.item import Item


def each_item(
    folder: Path,
    run: Mapping[str, Any],
    about: Mapping[str, Any],
    items: Sequence[Item],
    measure: Callable[[Item], Line],
    progress: Callable[[int, int], object] | None = None,
) -> list[Line]:
    """The lines of all items in their order; only those that `folder` lacks are measured.

    Args:
        folder: see `EvaluationFolder`.
        run: what the lines depend on, JSON; must be what it was when the folder began.
        about: what a reader of the folder should know.
        measure: a line without the item's name.
        progress: told of items that are there and of all, after every one.

    Raises:
        InputError: a folder of something else (names what differs), or one that another process writes.
        IntegrityError: the folder is damaged.
        StoreUnavailableError: it cannot be written.
    """
    files = EvaluationFolder(folder)
    with files.held():
        begun(files, run, about, items)
        files.drop_half_line()
        lines = files.read_lines()
        if [line.get("item") for line in lines] != [item.id for item in items[: len(lines)]]:
            raise IntegrityError(f"{files.lines}: not the lines of these items in their order")
        for item in items[len(lines) :]:
            line = {"item": item.id, "group": item.group, **measure(item)}
            files.add(line)
            lines.append(line)
            if progress is not None:
                progress(len(lines), len(items))
    return lines
