"""A run: every arm on every item, a line of a file for each, and nothing that is there computed again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquilt.errors import InputError, IntegrityError
from kvquilt.evaluation.run.arms import Arm, find_arms, measured, partners
from kvquilt.evaluation.run.config import RunConfig
from kvquilt.evaluation.run.controls import failed, tried
from kvquilt.evaluation.run.folder import EvaluationFolder, Line
from kvquilt.evaluation.run.identity import begun, identity, rankings
from kvquilt.evaluation.run.line_forms import check_lines, check_settings
from kvquilt.evaluation.run.preparing import Preparation
from kvquilt.evaluation.run.sounding import Sounder
from kvquilt.evaluation.tasks.item import Item

if TYPE_CHECKING:
    from kvquilt.engine import Engine


@dataclass(frozen=True, slots=True)
class RunProgress:
    """One prompt more was read.

    Attributes:
        done: prompts that were, of `total`, a line for each.
        item, method: which prompt.
    """

    done: int
    total: int
    item: str
    method: str


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run has found.

    Attributes:
        lines: of the items in order, the arms of each in order; without those of arms in `refused`.
        refused: why nothing is reported of an arm: a control of it failed.
    """

    lines: tuple[Line, ...] = field(repr=False)
    refused: dict[str, str]


@dataclass(eq=False, slots=True)
class Run:
    """Items under several arms on one engine.

    A run that was stopped, by whatever, goes on behind the last whole item in its folder and gives the lines of an
    uninterrupted one, but for ``seconds``. That holds as far as the engine is the same: model, dtype, device, threads,
    writers. Recipes that learn in use go on from what the store holds.

    Attributes:
        folder: of its files, see `EvaluationFolder`. A folder holds one run.
        tenant: whose segments.
        about: what a reader of the folder should know (task, split, machine); JSON, kept as the first call gives it.
    """

    engine: Engine
    items: Sequence[Item]
    config: RunConfig
    folder: Path
    tenant: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def go(self, progress: Callable[[RunProgress], object] | None = None) -> Finished:
        """Compute what is not there yet.

        Args:
            progress: called whenever a prompt has been read. What it raises ends the run.

        Raises:
            InputError: no items, two of one id, answers that are all longer than one may be, an item without a partner
                for a deranged arm; a folder of another run (names what differs) or one that another process runs into.
            ContextLengthError: an item's prompt does not fit; names it. Nothing has been computed then.
            UnsupportedModelError: endpoint checks fail on this model, so no method means anything.
            IntegrityError: the folder is damaged.
            StoreUnavailableError: it cannot be written.
        """
        arms = find_arms(self.config.methods)
        run = identity(self.engine, self.items, self.config)
        others = partners(self.items) if any(arm.deranged for arm in arms) else {}
        files = EvaluationFolder(self.folder)
        with files.held():
            controls = begun(files, run, self.about, self.items, lambda: tried(self.engine, self.items[0], arms))
            refused = failed(controls)
            files.drop_half_line()
            lines = files.read_lines()
            check_lines(files.lines, lines)
            self._go_on(files, measured(arms, refused), lines, others, progress)
        return Finished(tuple(lines), refused)

    def _go_on(
        self,
        files: EvaluationFolder,
        arms: Sequence[Arm],
        lines: list[Line],
        others: Mapping[str, Item],
        progress: Callable[[RunProgress], object] | None,
    ) -> None:
        plan = [(item.id, arm.name) for item in self.items for arm in arms]
        if [(line.get("item"), line.get("method")) for line in lines] != plan[: len(lines)]:
            raise IntegrityError(f"{files.lines}: not the lines of this run in its order")
        ranked = rankings(files, self.items)
        first = len(lines) // len(arms)  # an item's arms answer together: part of them begins anew
        del lines[first * len(arms) :]
        files.keep(len(lines))
        preparation = Preparation(self.engine, self.tenant, [arm.method for arm in arms])
        sounder = Sounder(self.engine, self.config, self.tenant)
        read = itertools.count(len(lines) + 1)

        def told(item: str, arm: Arm) -> None:
            done = next(read)
            if progress is not None:
                progress(RunProgress(done, len(plan), item, arm.name))

        if first < len(self.items):
            preparation.ahead([document for item in self.items for document in item.documents])
        for item, ranking in zip(self.items[first:], ranked[first:], strict=True):
            other = others.get(item.id)
            if other is not None:
                preparation.of(other.documents)
            compiled = preparation.of(item.documents)
            made = sounder.lines(arms, item, ranking, other, partial(told, item.id))
            for arm, line in zip(arms, made, strict=True):
                if arm.method.reuses:
                    line["seconds"]["compile"] = compiled[arm.method.writer]
            for line in made:
                files.add(line)
            lines += made


def read_finished(folder: Path) -> Finished:
    """What a run has left in its folder so far, without a model.

    Raises:
        InputError: no run is there.
        IntegrityError: the folder is damaged.
    """
    files = EvaluationFolder(folder)
    if (stored := files.read_run()) is None:
        raise InputError("folder", "holds no run" if folder.is_dir() else "no such folder", str(folder))
    if "kind" in stored["run"]:
        raise InputError("folder", f"holds a study of {stored['run']['kind']}, no run of `kvquilt eval`", str(folder))
    check_settings(files.run, stored["run"])
    lines = files.read_lines()
    check_lines(files.lines, lines)
    return Finished(tuple(lines), failed(stored["controls"]))
