"""HotpotQA as a task: one file evaluates, another one tunes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from kvquilt.evaluation.tasks.checks import check_count
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.hotpotqa import HotpotQA
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.splits import SPLITS, Divided, check_asked


@dataclass(frozen=True, slots=True)
class HotpotQATask:
    """Samples of two files. Tuning goes without those that share a paragraph with evaluation.

    Attributes:
        path: the file that evaluates, or a data set (see `read_rows`).
        tuning: the file that tunes; without one, the first `share` of `path`'s samples do.
        documents: how many an item has (see `HotpotQA.items`); 0 is all, in the file's order.
        with_title: whether a document begins with its title.
        paragraph: the most that a paragraph may measure (see `HotpotQA.items`); 0 is no bound.
        sha256: what the digest of `path` must be.
        length: measures a paragraph; characters by default.
        skipped: samples left out of tuning, by the reason.

    Raises:
        InputError: a file that cannot be read or has another form, a setting out of its range.
    """

    path: str | Path
    tuning: str | Path = ""
    share: float = 0.0
    documents: int = 0
    with_title: bool = True
    paragraph: int = 0
    sha256: str = ""
    length: Callable[[str], int] = len
    data: Divided[HotpotQA] = field(init=False, repr=False, compare=False)
    skipped: dict[str, int] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "hotpotqa"
    system: ClassVar[str] = HotpotQA.SYSTEM
    metric: ClassVar[Metric] = Metric("contains_em")
    answer_limit: ClassVar[int] = 32
    splits: ClassVar[tuple[str, ...]] = SPLITS
    extractive: ClassVar[bool] = False  # some are yes or no

    def __post_init__(self) -> None:
        check_count("documents", self.documents, 0)
        check_count("paragraph", self.paragraph, 0)
        read = HotpotQA.read(self.path, sha256=self.sha256 or None, with_title=self.with_title)
        tuning = HotpotQA.read(self.tuning, with_title=self.with_title).samples if self.tuning else None
        samples = Divided.of(read.samples, self.share, tuning)
        evaluation = replace(read, samples=samples.evaluation)
        tuned = replace(read, samples=samples.tuning).apart_from(evaluation)
        some = Divided(*((task,) if task.samples else () for task in (tuned, evaluation)))
        object.__setattr__(self, "data", some)
        apart = len(samples.tuning) - len(tuned.samples)
        object.__setattr__(self, "skipped", {"tuning samples that share a paragraph with evaluation": apart})

    def items(self, split: str, count: int | None = None, *, seed: int = 0) -> list[Item]:
        check_asked(count)
        (task,) = self.data.split(split)
        return task.items(count, self.documents or None, seed, limit=self.paragraph or None, length=self.length)
