"""A run's folder, read for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvquilt.errors import InputError
from kvquilt.evaluation.figures.summarising import summarise
from kvquilt.evaluation.figures.summary import Summary
from kvquilt.evaluation.run.arms import find_arms, measured
from kvquilt.evaluation.run.folder import EvaluationFolder, Line, by_item
from kvquilt.evaluation.run.line_forms import check_stored_items
from kvquilt.evaluation.run.run import Finished, read_finished
from kvquilt.evaluation.run.timed_prompt import TimedPrompt, read_timing


@dataclass(frozen=True, slots=True)
class Told:
    """A run, or as much of it as there is.

    Attributes:
        about: what the run was started with; `config` its settings.
        arms: names, of which there are lines, in the run's order.
        items: those that all arms have gone over, of `planned`; as the folder describes them.
        texts: question and documents by item; empty where the folder came without.
        lines: by item, then by arm.
        timing: what was timed of the run.
        summary: of these items.
    """

    name: str
    about: dict[str, Any]
    config: dict[str, Any]
    arms: tuple[str, ...]
    planned: int
    items: tuple[Line, ...] = field(repr=False)
    texts: dict[str, Line] = field(repr=False)
    lines: dict[str, dict[str, Line]] = field(repr=False)
    timing: tuple[TimedPrompt, ...] = field(repr=False)
    summary: Summary = field(repr=False)

    @property
    def title(self) -> str:
        """Task and model."""
        task = self.about.get("task") or self.items[0]["task"]
        model = self.about.get("model") or self.lines[self.items[0]["item"]]["full"]["ledger"]["model"]
        return f"{task} on {model}"

    @property
    def score(self) -> str:
        """The name of the task's own score."""
        return str(self.config["metric"]["grader"])

    @property
    def extent(self) -> str:
        """How many items in how many groups, and whether that is all."""
        groups = "" if self.summary.groups == len(self.items) else f" in {self.summary.groups} groups"
        rest = "" if len(self.items) == self.planned else f"; the run is not finished, it has {self.planned}"
        return f"{len(self.items)} items{groups}{rest}"

    @property
    def found_first(self) -> tuple[int, int]:
        """How often the retriever's best document is one that the answer rests on, and of how many items."""
        known = [item for item in self.items if item["gold"]]
        return sum(item["ranking"][0] in item["gold"] for item in known), len(known)


def read_told(folder: Path) -> Told:
    """What `kvquilt eval` has left in a folder so far.

    Raises:
        InputError: no run is there, or none of its items is finished.
        IntegrityError: the folder is damaged.
    """
    files, found = EvaluationFolder(folder), read_finished(folder)
    stored = files.read_run() or {}  # it was there a moment ago
    config = stored["run"]["config"]
    arms = tuple(arm.name for arm in measured(find_arms(config["methods"]), found.refused))
    lines = by_item(found.lines)
    items = files.read_items()
    check_stored_items(files.items, items)
    whole = tuple(item for item in items if len(lines.get(item["item"], {})) == len(arms))
    if not whole:
        raise InputError("folder", "holds no item that is finished", str(folder))
    kept = {item["item"]: lines[item["item"]] for item in whole}
    finished = Finished(tuple(line for each in kept.values() for line in each.values()), found.refused)
    timing, kinds = read_timing(folder), {item["item"]: item.get("kind", "") for item in whole}
    return Told(
        name=folder.resolve().name,
        about=stored["about"],
        config=config,
        arms=arms,
        planned=len(items),
        items=whole,
        texts=files.read_texts(),
        lines=kept,
        timing=timing,
        summary=summarise(finished, timing=timing, kinds=kinds),
    )
