"""A study of attention: every arm on every item, a line of a file for each; what is there is never computed again."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvquilt.errors import InputError, IntegrityError
from kvquilt.evaluation.run.arms import AGAIN, CONTROLS, FULL, Arm, find_arm
from kvquilt.evaluation.run.controls import failed, tried
from kvquilt.evaluation.run.folder import EvaluationFolder, Line
from kvquilt.evaluation.run.identity import begun, check_items, identity_of, prompt_ids, rankings
from kvquilt.evaluation.run.preparing import Preparation
from kvquilt.evaluation.studies.attention_forms import checked
from kvquilt.evaluation.studies.attention_look import Look, answer_ids, looking
from kvquilt.evaluation.studies.attention_measures import Compared, compare
from kvquilt.evaluation.tasks.item import Item
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.placement import Placement, place_runs
from kvquilt.repair.presets import METHODS, Method, find_method
from kvquilt.repair.written import split

if TYPE_CHECKING:
    from kvquilt.engine import Engine

KIND = "attention"
NONE = "none"  # what ratios are to
_DIGITS = 5


def find_attention_arms(methods: Sequence[str]) -> tuple[Arm, ...]:
    """Full prefill, the same in another layout (what rounding alone does), pure reuse, then `methods`, each once.

    Raises:
        InputError: no list, an unknown method; a control that has another prompt.
    """
    if isinstance(methods, str):
        raise InputError("methods", "must be a list of methods", methods)
    names = tuple(dict.fromkeys((FULL, AGAIN, NONE, *methods)))
    for name in names:
        if name == AGAIN:
            continue
        if isinstance(name, str) and split(name)[0] in CONTROLS:
            raise InputError("methods", "takes methods; this arm only `kvquilt eval` has", name)
        find_method(name)
    return tuple(find_arm(name) for name in names)


@dataclass(eq=False, slots=True)
class AttentionRun:
    """Items under several methods on one engine; like `Run`, one that was stopped goes on where it was.

    Attributes:
        folder: of its files, see `EvaluationFolder`; a line has the fields of `Compared`. A folder holds one run.
        tenant: whose segments.
        about: what a reader of the folder should know; JSON, kept as the first call gives it.
    """

    engine: Engine
    items: Sequence[Item]
    methods: Sequence[str]
    folder: Path
    tenant: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def go(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Compute what is not there yet.

        Args:
            progress: told of lines that are there and of all, after every one. What it raises ends the run.

        Raises:
            InputError: no items, two of one id; a folder of another run (names what differs) or one that another
                process runs into.
            ContextLengthError: an item's prompt does not fit; names it. Nothing has been computed then.
            UnsupportedModelError: endpoint checks fail on this model, or a layer attends more than once.
            IntegrityError: the folder is damaged.
            StoreUnavailableError: it cannot be written.
        """
        arms = find_attention_arms(self.methods)
        run = self._identity()
        files = EvaluationFolder(self.folder)
        with files.held():
            controls = begun(files, run, self.about, self.items, lambda: tried(self.engine, self.items[0], arms))
            refused = failed(controls)
            files.drop_half_line()
            self._go_on(files, [arm for arm in arms if arm.name not in refused], progress)

    def _go_on(
        self, files: EvaluationFolder, arms: Sequence[Arm], progress: Callable[[int, int], object] | None
    ) -> None:
        plan = [(item.id, arm.name) for item in self.items for arm in arms]
        there = [(line["item"], line["method"]) for line in checked(files.lines, files.each_line())]
        if there != plan[: len(there)]:
            raise IntegrityError(f"{files.lines}: not the lines of this run in its order")
        ranked = rankings(files, self.items)
        done = len(there)
        preparation = Preparation(self.engine, self.tenant, [arm.method for arm in arms])
        if done < len(plan):
            preparation.ahead([document for item in self.items for document in item.documents])
        for n, item in enumerate(self.items):
            missing = arms[max(0, done - n * len(arms)) :]
            if not missing:
                continue
            preparation.of(item.documents)
            with closing(self._lines(item, missing, ranked[n])) as made:  # whatever ends it, caches go back
                for line in made:
                    files.add(line)
                    done += 1
                    if progress is not None:
                        progress(done, len(plan))

    def _lines(self, item: Item, arms: Sequence[Arm], ranking: Sequence[int]) -> Generator[Line, None, None]:
        runs = self.engine.prompt(item.question, item.documents).runs(self.engine.model.tokenizer)
        answer, documents = answer_ids(self.engine, item), item.documents
        about = {"item": item.id, "group": item.group}
        sizes = {"tokens": [len(run.ids) for run in runs if run.document is not None], "rows": len(answer)}

        def placed(method: Method) -> Placement:
            return place_runs(runs, method.order, ranking if method.needs_ranking else (), method.moved)

        # full prefill's cache stays until the item is done: the arms are compared with it layer by layer
        with looking(self.engine, placed(METHODS[FULL]), METHODS[FULL], self.tenant, documents, answer) as full:
            for arm in arms:
                line: Line = {**about, "method": arm.name, "refused": None, **sizes}
                try:
                    line |= as_json(self._compared(full, arm, placed(arm.method), documents, answer))
                except InputError as error:
                    line["refused"] = str(error)
                yield line

    def _compared(
        self, full: Look, arm: Arm, placement: Placement, documents: Sequence[Any], answer: Sequence[int]
    ) -> Compared:
        if arm.name == FULL:
            return compare(full, full)
        with looking(self.engine, placement, arm.method, self.tenant, documents, answer, in_parts=arm.in_parts) as look:
            return compare(full, look)

    def _identity(self) -> dict[str, Any]:
        check_items(self.items)
        digests = [("item", self._digest(item)) for item in self.items]
        return {
            "kind": KIND,
            "methods": list(dict.fromkeys(self.methods)),
            "items": digest_fields("kvquilt 2026-11 attention items v1", digests),
            **identity_of(self.engine),
        }

    def _digest(self, item: Item) -> str:
        answer = answer_ids(self.engine, item)
        ids = prompt_ids(self.engine, item, len(answer))
        named: list[tuple[str, bytes | str | None]] = [("id", item.id), ("group", item.group), ("prompt", ids)]
        named += [("answer", encode_ids(answer))]
        named += [("document", f"{document.score} {document.id}") for document in item.documents]
        return digest_fields("kvquilt 2026-11 attention item v1", named)


def as_json(compared: Compared) -> dict[str, Any]:
    """Its numbers as lists of five digits, null for NaN."""
    return {each.name: _plain(getattr(compared, each.name)) for each in fields(compared)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if math.isnan(value) else float(f"{value:.{_DIGITS}g}")
