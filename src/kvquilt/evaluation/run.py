"""A run: every arm on every item, a line of a file for each, and nothing that is there computed again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvquilt.context import check_prompt_fits
from kvquilt.endpoints import check_endpoints
from kvquilt.errors import InputError, IntegrityError, UnsupportedModelError
from kvquilt.evaluation.arms import FULL, Arm, find_arms
from kvquilt.evaluation.item import Item
from kvquilt.evaluation.preparing import Preparation
from kvquilt.evaluation.run_config import RunConfig, differences
from kvquilt.evaluation.run_folder import EvaluationFolder, Line
from kvquilt.evaluation.self_transfer import check_method
from kvquilt.evaluation.sounding import Sounder, Truth, gold_ids
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.repair.presets import METHODS
from kvquilt.retrieval import ranked_documents

if TYPE_CHECKING:
    from kvquilt.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """One line more.

    Attributes:
        done: lines that are there, of `total`.
        seconds: since this call began; `remaining` is an estimate, by what each arm took so far.
    """

    done: int
    total: int
    item: str
    method: str
    seconds: float
    remaining: float


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

    A run that was stopped, by whatever, goes on behind the last whole line in its folder and gives the lines of an
    uninterrupted one, but for ``seconds``. That holds as far as the engine is the same: model, dtype, threads, writers.
    Recipes that learn in use go on from what the store holds.

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
            progress: called after every line. What it raises ends the run, which can go on from there.

        Raises:
            InputError: no items, two of one id, a folder of another run (names what differs) or one that another
                process runs into.
            ContextLengthError: an item's prompt does not fit; names it. Nothing has been computed then.
            UnsupportedModelError: endpoint checks fail on this model, so no method means anything.
            IntegrityError: the folder is damaged.
            StoreUnavailableError: it cannot be written.
        """
        arms = find_arms(self.config.methods)
        run = self._identity()
        files = EvaluationFolder(self.folder)
        with files.held():
            stored = files.read_run()
            if stored is None:
                files.write(
                    {"run": run, "about": dict(self.about), "controls": self._controls(arms)}, self._described()
                )
                stored = files.read_run()
                assert stored is not None  # just written
            elif differing := differences(run, stored["run"]):
                rule = f"holds another run: it differs in {', '.join(differing)}; choose another folder"
                raise InputError("folder", rule, str(self.folder))
            refused = _refused(stored["controls"])
            left = tuple(arm for arm in arms if arm.name not in refused and arm.order_of not in refused)
            files.drop_half_line()
            lines = files.read_lines()
            self._go_on(files, left, lines, progress)
        return Finished(tuple(lines), refused)

    def _go_on(
        self,
        files: EvaluationFolder,
        arms: Sequence[Arm],
        lines: list[Line],
        progress: Callable[[RunProgress], object] | None,
    ) -> None:
        plan = [(item.id, arm.name) for item in self.items for arm in arms]
        if [(line.get("item"), line.get("method")) for line in lines] != plan[: len(lines)]:
            raise IntegrityError(f"{files.lines}: not the lines of this run in its order")
        rankings = [item["ranking"] for item in files.read_items()]
        clock = _Clock(len(plan), [arm.name for arm in arms], len(lines))
        preparation = Preparation(self.engine, self.tenant, [arm.method for arm in arms])
        sounder = Sounder(self.engine, self.config, self.tenant)
        if len(lines) < len(plan):
            preparation.ahead([document for item in self.items for document in item.documents])
        for n, (item, ranking) in enumerate(zip(self.items, rankings, strict=True)):
            earlier = {line["method"]: line for line in lines[n * len(arms) : (n + 1) * len(arms)]}
            missing = [arm for arm in arms if arm.name not in earlier]
            if not missing:
                continue
            compiled = preparation.of(item.documents)
            # in a sitting that begins amid an item, full prefill is asked again for what no file holds
            truth: Truth | None = None
            if missing[0].name != FULL:
                truth = sounder.again(item, earlier[FULL])
            for arm in missing:
                began = perf_counter()
                line, truth = sounder.line(arm, item, ranking, earlier, truth)
                line["seconds"] = {**line["seconds"], "compile": compiled.get(arm.method.writer, 0.0)}
                files.add(line)
                lines.append(line)
                earlier[arm.name] = line
                at = clock.tick(arm.name, perf_counter() - began)
                if progress is not None:
                    progress(RunProgress(len(lines), len(plan), item.id, arm.name, *at))

    def _identity(self) -> dict[str, Any]:
        """Everything that lines depend on, as JSON gives it back."""
        if not self.items:
            raise InputError("items", "at least one is needed")
        if len({item.id for item in self.items}) < len(self.items):
            raise InputError("items", "no id may occur twice")
        reader, parts = self.engine.reader, []
        for item in self.items:
            prompt = self.engine.prompt(item.question, item.documents).runs(reader.model.tokenizer)
            try:
                room = max(self.config.new_tokens, len(gold_ids(self.engine, item)))
                check_prompt_fits(reader.model.capability, prompt, room)
            except InputError as error:
                raise type(error)(f"items ({item.id}): {error.field}", error.rule, error.got) from None
            ids = encode_ids([i for run in prompt for i in run.ids])
            said = [*item.answers, item.group, str(item.gold), *(f"{d.id} {d.score}" for d in item.documents)]
            parts.append(("item", digest_fields("kvquilt 2026-11 item v1", [(item.id, ids), *(("", s) for s in said)])))
        return {
            "config": self.config.as_dict(),
            "items": digest_fields("kvquilt 2026-11 items v1", parts),
            "model": reader.model.fingerprint.digest,
            "threads": reader.model.threads,
            "writer": reader.writer.digest,
            "trained writers": sorted(reader.identities),
            "helper": None if reader.helper is None else reader.helper.fingerprint.digest,
        }

    def _described(self) -> list[dict[str, Any]]:
        """Items as the folder keeps them, with the one ranking that all arms see."""
        return [
            {
                "item": item.id,
                "group": item.group,
                "task": item.task,
                "documents": [document.id for document in item.documents],
                "gold": list(item.gold),
                "answers": list(item.answers),
                "ranking": ranked_documents(item.question, item.documents),
            }
            for item in self.items
        ]

    def _controls(self, arms: Sequence[Arm]) -> dict[str, list[dict[str, Any]]]:
        """Checks by arm, on the first item; those of the engine as a whole stand under ``full``."""
        item = self.items[0]
        documents = list({document.text: document for document in item.documents}.values())
        engine = [asdict(check) for check in check_endpoints(self.engine, documents)]
        if failed := [check["name"] for check in engine if not check["passed"]]:
            raise UnsupportedModelError(f"{self.engine.model.name}: endpoint checks failed: {', '.join(failed)}")
        runs = self.engine.prompt(item.question, documents).runs(self.engine.model.tokenizer)
        ranking = ranked_documents(item.question, [run.document for run in runs if run.document is not None])
        found = {METHODS["full"].name: engine}
        for arm in arms:
            if arm.method.reuses:
                checks = check_method(self.engine, arm.method, runs, ranking)
                found[arm.name] = [asdict(check) for check in checks]
        return found


def _refused(controls: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Why nothing may be reported of some arms."""
    out = {}
    for name, checks in controls.items():
        failed = [f"{c['name']} (KL {c['value']:.2g}, at most {c['limit']:.2g})" for c in checks if not c["passed"]]
        if failed:
            out[name] = f"it must equal full prefill, and does not: {', '.join(failed)}"
            log.warning("%s is not measured: %s", name, out[name])
    return out


@dataclass(eq=False, slots=True)
class _Clock:
    """What is left, by what each arm took; one that was not measured yet takes what the others do."""

    total: int
    arms: Sequence[str]
    done: int
    _began: float = field(default_factory=perf_counter)
    _taken: dict[str, list[float]] = field(default_factory=dict)

    def tick(self, arm: str, seconds: float) -> tuple[float, float]:
        """Seconds since the beginning, and to the end."""
        self.done += 1
        self._taken.setdefault(arm, []).append(seconds)
        means = {name: sum(each) / len(each) for name, each in self._taken.items()}
        overall = sum(means.values()) / len(means)
        left = (self.arms[n % len(self.arms)] for n in range(self.done, self.total))
        return perf_counter() - self._began, sum(means.get(name, overall) for name in left)
