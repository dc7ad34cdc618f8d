"""The settings of a study of the repair budget: every one a folder, with its items and arms."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvquilt.errors import InputError
from kvquilt.evaluation.run.arms import WITHOUT, find_arm, find_arms, partners
from kvquilt.evaluation.run.config import RunConfig
from kvquilt.evaluation.studies.interference import (
    KINDS,
    MOST,
    PLACES,
    STRUCTURES,
    Place,
    Structure,
    cells,
    targets,
    task_of,
)
from kvquilt.evaluation.studies.repair_budget_arms import (
    CONTEXT,
    NONE,
    STRUCTURE,
    TARGETS,
    budget_arms,
    given_steps,
    share,
    token_selectors,
)
from kvquilt.evaluation.tasks.by_name import find_task
from kvquilt.evaluation.tasks.checks import check_count, check_name
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.task import Task

log = logging.getLogger(__name__)
PARTS = ("structure", "attribution", "budget", "context", "retrieval")
ARMS, DISTANCES, HITS = "arms", "distances", "hits"


@dataclass(frozen=True, slots=True)
class RepairBudget:
    """What a study looks at.

    Attributes:
        tasks: as `find_task` takes them, for every part but ``structure``.
        kinds: of generated questions, for ``structure``; `structures`, `distractors`, `places`: its cells.
        budget: of every arm that has one, such as ``5%``.
        cell_items: of each cell; `items`: of each task's evaluation split; `tuning_items`: of its tuning split.
        seeds: how often random rows, and the order in which distractors are mended, are drawn.
        more: arms besides, measured at no other terms, in the part ``budget``.
        seed: of what is drawn for items.
        new_tokens: of an answer; None: the task's own limit.

    Raises:
        InputError: nothing to look at, an unknown part, kind, structure, place, task or arm; a number out of range.
    """

    tasks: tuple[str, ...] = ("biography",)
    parts: tuple[str, ...] = PARTS
    kinds: tuple[str, ...] = KINDS[:1]
    structures: tuple[Structure, ...] = STRUCTURES
    distractors: tuple[int, ...] = (1, 7)
    places: tuple[Place, ...] = ("first", "last")
    budget: str = "5%"
    cell_items: int = 2
    items: int = 6
    tuning_items: int = 4
    seeds: int = 2
    more: tuple[str, ...] = ()
    seed: int = 0
    new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, valid in (("parts", PARTS), ("kinds", KINDS), ("structures", STRUCTURES), ("places", PLACES)):
            if not getattr(self, name):
                raise InputError(name, "name at least one")
            for each in getattr(self, name):
                check_name(name, each, valid)
        if not self.tasks or not self.distractors:
            raise InputError("tasks" if not self.tasks else "distractors", "name at least one")
        for number in self.distractors:
            check_count("distractors", number, 1, min(MOST[kind] for kind in self.kinds))
        for name in ("cell_items", "items", "tuning_items", "seeds"):
            check_count(name, getattr(self, name), 1)
        object.__setattr__(self, "budget", share(self.budget))
        for task in self.tasks:
            find_task(task)
        find_arms(budget_arms(self.budget, self.seeds, self.more))


@dataclass(frozen=True, slots=True)
class Setting:
    """One folder of the study.

    Attributes:
        folder: below the study's own.
        of: the task or kind, as written.
        measures: `ARMS`, which makes it an ordinary `Run`; `DISTANCES` or `HITS`, a line for an item.
        about: what tells it from others: the cell, the split, what was left out and why.
    """

    folder: str
    part: str
    of: str
    system: str
    items: tuple[Item, ...] = field(repr=False)
    config: RunConfig
    measures: str = ARMS
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def prompts_a_line(self) -> int:
        """That are read for a line: of an arm, or of an item under all of them and full prefill."""
        return 1 + len(self.config.methods) if self.measures == DISTANCES else 1

    @property
    def prompts(self) -> int:
        """Of all lines, as long as no arm fails a control."""
        arms = len(find_arms(self.config.methods)) if self.measures == ARMS else self.prompts_a_line
        return len(self.items) * arms


def settings(plan: RepairBudget, length: Callable[[str], int]) -> list[Setting]:
    """All of them, in the order in which they are measured.

    Args:
        length: measures a text in tokens.

    Raises:
        InputError: a task without a tuning split, or without an item that says what its answer rests on.
    """
    made = list(_structure(plan, length)) if "structure" in plan.parts else []
    for name, written in zip(folder_names(plan.tasks), plan.tasks, strict=True):
        task = find_task(written, length=length)
        made += _of_task(plan, name, written, task)
    return made


def folder_names(tasks: Sequence[str]) -> list[str]:
    """A name for each task: its own, and a number from the second of that name on."""
    names = [find_task(task).name for task in tasks]
    before = [names[:n].count(name) for n, name in enumerate(names)]
    return [name if not n else f"{name}-{n + 1}" for name, n in zip(names, before, strict=True)]


def _structure(plan: RepairBudget, length: Callable[[str], int]) -> Iterator[Setting]:
    most = max(plan.distractors)
    for kind in plan.kinds:
        task = task_of(kind, most, plan.seed)
        asked = targets(kind, plan.cell_items, most, length, seed=plan.seed)
        for cell in cells(plan.distractors, plan.places, plan.structures):
            about = {"structure": cell.structure, "distractors": cell.distractors, "place": cell.place}
            yield Setting(
                f"structure/{kind}/{cell.name}", "structure", kind, task.system,
                tuple(target.placed(cell, length) for target in asked), _config(plan, task, STRUCTURE), about=about,
            )  # fmt: skip


def _of_task(plan: RepairBudget, name: str, of: str, task: Task) -> Iterator[Setting]:
    items = tuple(task.items("evaluation", plan.items, seed=plan.seed))
    known = tuple(item for item in items if item.gold)
    about = {"items without known gold": len(items) - len(known)}
    if not known and {"attribution", "context", "retrieval"} & {*plan.parts}:
        raise InputError("task", "no item says which documents its answer rests on: only --part budget can ask it", of)
    base = Setting("", "", of, task.system, known, _config(plan, task, CONTEXT), about=about)
    if "attribution" in plan.parts:
        steps = given_steps(known, plan.seeds)
        config = _config(plan, task, (NONE, *steps))
        yield replace(
            base, folder=f"attribution/{name}", part="attribution", config=config, about=about | {"given": steps}
        )
    if "budget" in plan.parts:
        yield from _budget(plan, name, base, task, items)
    if "context" in plan.parts:
        yield replace(base, folder=f"context/{name}/answers", part="context")
        config = _config(plan, task, TARGETS)
        yield replace(base, folder=f"context/{name}/distances", part="context", config=config, measures=DISTANCES)
    if "retrieval" in plan.parts:
        config = _config(plan, task, (NONE,))
        yield replace(base, folder=f"retrieval/{name}", part="retrieval", config=config, measures=HITS)


def _budget(plan: RepairBudget, name: str, base: Setting, task: Task, items: tuple[Item, ...]) -> Iterator[Setting]:
    tuning = tuple(task.items("tuning", plan.tuning_items, seed=plan.seed))
    candidates = token_selectors(plan.budget, plan.seeds)
    tokens = tuple(arm for arms in candidates.values() for arm in arms)
    # what is chosen by is distance, which needs no answers
    config = replace(_config(plan, task, (NONE, *tokens)), silent=(WITHOUT, NONE, *tokens))
    about = {"split": "tuning", "budget": plan.budget, "candidates": {k: list(v) for k, v in candidates.items()}}
    yield replace(base, folder=f"budget/{name}/tuning", part="budget", items=tuning, config=config, about=about)
    arms, left_out = budget_arms(plan.budget, plan.seeds, plan.more), {}
    try:
        partners(items)
    except InputError as error:
        deranged = [arm for arm in arms if find_arm(arm).deranged]
        left_out = dict.fromkeys(deranged, str(error))
        arms = tuple(arm for arm in arms if arm not in left_out)
        log.warning("%s: %s left out: %s", base.of, ", ".join(deranged), error)
    about = {"split": "evaluation", "budget": plan.budget, "left out": left_out}
    config = _config(plan, task, arms)
    yield replace(base, folder=f"budget/{name}/evaluation", part="budget", items=items, config=config, about=about)


def _config(plan: RepairBudget, task: Task, methods: tuple[str, ...]) -> RunConfig:
    return RunConfig(methods, task.metric, new_tokens=plan.new_tokens or task.answer_limit)
