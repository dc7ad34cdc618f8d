"""First tokens of a run's arms, timed by the rule of `kvquilt.evaluation.run.timing` once its lines are there.

Lines hold one reading each, which nothing warmed up. Here every arm reads the same few prompts again and again, in
turns; what that gives stays in the run's folder, beside the lines.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from kvquilt.bench import environment
from kvquilt.errors import InputError
from kvquilt.evaluation.run.arms import FULL, Arm, find_arms, measured, partners
from kvquilt.evaluation.run.folder import EvaluationFolder, Line, by_item
from kvquilt.evaluation.run.preparing import Preparation
from kvquilt.evaluation.run.run import Finished, Run
from kvquilt.evaluation.run.timed_prompt import TimedPrompt, read_timing, write_timing
from kvquilt.evaluation.run.timing import REPEATS, WARMUPS, ArmPrompt, first_tokens
from kvquilt.evaluation.tasks.checks import check_count
from kvquilt.evaluation.tasks.item import Item
from kvquilt.ledger import Ledger
from kvquilt.prompt import segment_ids

_COMPILES = 3  # of each recipe, behind one that does not count


def time_run(
    run: Run, finished: Finished, prompts: int = 1, progress: Callable[[int, int], object] | None = None
) -> tuple[TimedPrompt, ...]:
    """Time every arm on `prompts` of the run's prompts, those of median length; what the folder has is not timed again.

    Args:
        finished: what `Run.go` gave.
        prompts: how many there are to be; those that are there stay, however many.
        progress: told before every prompt which it is, and of how many.

    Returns:
        All that the folder has now.

    Raises:
        InputError: lines of a run that is not finished; documents of a prompt that do not all fit into memory.
        IntegrityError: the folder is damaged.
        StoreUnavailableError: it cannot be written.
    """
    check_count("prompts", prompts, 0)
    arms = measured(find_arms(run.config.methods), finished.refused)
    lines = by_item(finished.lines)
    if any(len(lines.get(item.id, {})) < len(arms) for item in run.items):
        raise InputError("finished", "must be a run that is finished, all arms on all items")
    files = EvaluationFolder(run.folder)
    with files.held():
        there = list(read_timing(run.folder))
        wanted = of_median_length(lines)[:prompts]
        missing = [name for name in wanted if name not in {each.item for each in there}]
        if missing:
            timer = _Timer(run, arms, {each["item"]: each["ranking"] for each in files.read_items()})
        for name in missing:
            if progress is not None:
                progress(wanted.index(name) + 1, len(wanted))
            there.append(timer.prompt(name, lines[name]))
            write_timing(run.folder, there)
    return tuple(there)


def of_median_length(lines: Mapping[str, Mapping[str, Line]]) -> list[str]:
    """Items, best first: where the fewest arms were refused, and the prompt's length is nearest to the median."""
    tokens = {item: each[FULL]["prompt"]["tokens"] for item, each in lines.items()}
    middle = statistics.median(tokens.values())
    refused = {item: sum(line["refused"] is not None for line in each.values()) for item, each in lines.items()}
    return sorted(lines, key=lambda item: (refused[item], abs(tokens[item] - middle)))


class _Timer:
    """Makes ready what the prompts of a run need, and times them."""

    def __init__(self, run: Run, arms: Sequence[Arm], rankings: Mapping[str, Sequence[int]]) -> None:
        self.run, self.arms, self.rankings = run, arms, rankings
        self.items = {item.id: item for item in run.items}
        self.others = partners(run.items) if any(arm.deranged for arm in arms) else {}
        self.preparation = Preparation(run.engine, run.tenant, [arm.method for arm in arms])
        # recipes that look at more than one document find those of the run, as its lines did
        self.preparation.ahead([document for item in run.items for document in item.documents])

    def prompt(self, name: str, lines: Mapping[str, Line]) -> TimedPrompt:
        item, other, engine = self.items[name], self.others.get(name), self.run.engine
        arms = [arm for arm in self.arms if lines[arm.name]["refused"] is None and arm.has_a_cost]
        if other is not None:
            self.preparation.of(other.documents)
        self.preparation.of(item.documents)
        compiling = self._compiling([arm for arm in arms if arm.is_method], item)
        load = _load()
        taken = first_tokens(engine, {arm.name: self._read(arm, item, lines, other) for arm in arms}, self.run.tenant)
        about = {
            **environment(),
            "threads": engine.model.threads,
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "device": str(engine.model.device),
            "warmups": WARMUPS,
            "repeats": REPEATS,
            "load": [load, _load()],
        }
        return TimedPrompt(name, lines[FULL]["prompt"]["tokens"], taken, compiling, about)

    def _read(self, arm: Arm, item: Item, lines: Mapping[str, Line], other: Item | None) -> ArmPrompt:
        engine, ranking = self.run.engine, self.rankings[item.id]
        documents = arm.documents(item, ranking, lines, other)
        runs = engine.prompt(item.question, documents).runs(engine.model.tokenizer)
        return ArmPrompt(arm.method, runs, arm.ranking(item, ranking, other), arm.in_parts)

    def _compiling(self, arms: Sequence[Arm], item: Item) -> dict[str, float]:
        """Median seconds in which the recipe of each arm compiles the item's documents. Nothing of it is stored."""
        taken = {recipe: self._compiled(recipe, item) for recipe in dict.fromkeys(arm.method.writer for arm in arms)}
        return {arm.name: taken[arm.method.writer] for arm in arms}

    def _compiled(self, recipe: str, item: Item) -> float:
        reader = self.run.engine.reader
        segments = list(dict.fromkeys(segment_ids(each, reader.model.tokenizer) for each in item.documents))
        writers = reader.recipe(recipe).prepare(reader.notes(self.run.tenant).apart(), segments)
        seconds = []
        for _ in range(1 + _COMPILES):
            began = time.perf_counter()
            for _ in reader.compiler(segments, Ledger(), writers)(list(range(len(segments)))):
                pass
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:])


def _load() -> float | None:
    """How many processes wanted to run in the last minute, where the system says."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
