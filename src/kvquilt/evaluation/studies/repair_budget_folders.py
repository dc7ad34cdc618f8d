"""The folders of a study of the repair budget, read for its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquilt.errors import InputError
from kvquilt.evaluation.run.folder import EvaluationFolder, Line
from kvquilt.evaluation.run.run import Finished, read_finished
from kvquilt.evaluation.studies.repair_budget_forms import check_distances, check_hits, check_setting
from kvquilt.evaluation.studies.repair_budget_settings import ARMS, DISTANCES


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting that is finished."""

    name: str
    about: Mapping[str, Any]
    lines: tuple[Line, ...]
    refused: Mapping[str, str]

    @property
    def study(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.about["study"]
        return found

    @property
    def finished(self) -> Finished:
        return Finished(self.lines, dict(self.refused))


def read_settings(folder: Path) -> tuple[list[Measured], list[str]]:
    """Settings that are finished, by name, and the names of those that are begun and not done.

    Raises:
        InputError: no study is there.
        IntegrityError: a folder is damaged.
    """
    found, unfinished = [], []
    for path in sorted(folder.glob("*/**/run.json")):
        files, name = EvaluationFolder(path.parent), str(path.parent.relative_to(folder))
        about = (files.read_run() or {}).get("about", {})
        if "study" not in about:
            continue
        check_setting(files.run, about["study"])
        finished = _lines(files, about["study"]["measures"])
        items, arms = len(files.read_items()), len({line.get("method") for line in finished.lines})
        if not finished.lines or len(finished.lines) != items * arms:
            unfinished.append(name)
        else:
            found.append(Measured(name, about, finished.lines, finished.refused))
    if not found and not unfinished:
        raise InputError("folder", "holds no study of the repair budget", str(folder))
    return found, unfinished


def _lines(files: EvaluationFolder, measures: str) -> Finished:
    if measures == ARMS:
        return read_finished(files.path)
    lines = files.read_lines()  # of items: they have no arms
    check = check_distances if measures == DISTANCES else check_hits
    check(files.lines, lines)
    return Finished(tuple(lines), {})
