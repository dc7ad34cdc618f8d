"""The study of the repair budget: what reuse damages, what mends it, and where a small budget is best spent.

structure    damage of pure reuse by what stands beside the document that answers, how much of it, and where
attribution  how much of it goes when the other documents, one after the other, have full prefill's rows
budget       a document moved and computed again, against other documents, orders and tokens, at one budget
context      the document that answers: reused, replaced by full prefill's rows, computed again, moved last
retrieval    who finds that document: question attention over the reused cache, or a retriever
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquilt.dense import Encoder
from kvquilt.evaluation.run.folder import EvaluationFolder
from kvquilt.evaluation.run.identity import identity
from kvquilt.evaluation.run.item_lines import each_item
from kvquilt.evaluation.run.run import Run
from kvquilt.evaluation.studies.kv_distance import KVDistance
from kvquilt.evaluation.studies.repair_budget_settings import ARMS, DISTANCES, RepairBudget, Setting, settings
from kvquilt.evaluation.studies.target_hits import TargetHits
from kvquilt.evaluation.tasks.by_name import find_task
from kvquilt.files import held
from kvquilt.tokens import encoder

if TYPE_CHECKING:
    from kvquilt.engine import Engine


@dataclass(frozen=True, slots=True)
class StudyProgress:
    """Where a study is.

    Attributes:
        setting: the folder that is being filled, `number` of `settings`, from 1.
        done: prompts that were read for all settings, of `total` at most: arms that fail a control read none.
        begins: whether nothing was read for the setting in this call yet; `done` is what was there.
    """

    setting: str
    number: int
    settings: int
    done: int
    total: int
    begins: bool = False


@dataclass(eq=False, slots=True)
class RepairBudgetStudy:
    """Every setting in a folder of its own below `folder`; one that was stopped goes on.

    Attributes:
        engines: an engine whose prompts have this system message; all over the same model.
        dense: a retriever by vectors, for the part ``retrieval``.
        about: what a reader of the folders should know: model, machine.
        called: what a task is called there, such as without the folders of this machine.
    """

    engines: Callable[[str], Engine]
    plan: RepairBudget
    folder: Path
    dense: Encoder | None = None
    tenant: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    called: Callable[[str], str] = str
    _engines: dict[str, Engine] = field(init=False, default_factory=dict, repr=False)

    def go(self, progress: Callable[[StudyProgress], object] | None = None) -> None:
        """Measure what is not there yet; `figures` reads what it was.

        Args:
            progress: called at a setting's beginning and after every line. What it raises ends the study.

        Raises:
            InputError: what `settings` raises; a folder of another study (names what differs), or one that another
                process measures into.
            ContextLengthError: an item does not fit; names it.
            UnsupportedModelError: endpoint checks fail on this model, so no method means anything.
            IntegrityError, StoreUnavailableError: a folder is damaged, or cannot be written.
        """
        encode = encoder(self._engine(find_task(self.plan.tasks[0]).system).model.tokenizer).encode
        planned = settings(self.plan, lambda text: len(encode(text)))
        told = _Told(progress, planned)
        with held(self.folder, "folder", "measures into"):
            for setting in planned:
                told.begin(EvaluationFolder(self.folder / setting.folder).count())
                self._measure(setting, told)

    def _measure(self, setting: Setting, told: _Told) -> None:
        engine, folder = self._engine(setting.system), self.folder / setting.folder
        of = self.called(setting.of)
        about = {
            **self.about,
            "task": of,
            "split": setting.about.get("split", "evaluation"),
            "score": setting.config.metric.grader,
            "system": setting.system,
            "study": {"part": setting.part, "of": of, "measures": setting.measures, **setting.about},
        }
        if setting.measures == ARMS:
            run = Run(engine, setting.items, setting.config, folder, self.tenant, about)
            run.go(lambda now: told.lines(now.done))
            return
        of_what = {**identity(engine, setting.items, setting.config), "measures": setting.measures}
        if setting.measures == DISTANCES:
            measure = KVDistance(engine, setting.config.methods, self.tenant).line
        else:
            of_what["dense"] = self.dense.name if self.dense is not None else None
            measure = TargetHits(engine, self.dense, self.tenant).line
        each_item(folder, of_what, about, setting.items, measure, lambda done, _: told.lines(done))

    def _engine(self, system: str) -> Engine:
        if system not in self._engines:
            self._engines[system] = self.engines(system)
        return self._engines[system]


@dataclass(eq=False, slots=True)
class _Told:
    """Lines of one setting after the other as prompts of them all."""

    tell: Callable[[StudyProgress], object] | None
    planned: Sequence[Setting]
    number: int = 0

    def begin(self, there: int) -> None:
        """The next setting, of which so many lines are there."""
        self.number += 1
        self.lines(there, begins=True)

    def lines(self, count: int, begins: bool = False) -> None:
        """So many are there now."""
        *before, now = self.planned[: self.number]
        done = sum(setting.prompts for setting in before) + count * now.prompts_a_line
        total = sum(setting.prompts for setting in self.planned)
        if self.tell is not None:
            self.tell(StudyProgress(now.folder, self.number, len(self.planned), done, total, begins))
