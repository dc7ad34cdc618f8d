"""What a task is: questions with known answers over documents, in splits that share nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.item import Item


class Task(Protocol):
    """A frozen dataclass whose fields are the task's settings; same settings, same items.

    Attributes:
        name: what `find_task` finds it by, and `Item.task` of its items.
        system: the system message that its questions are asked under.
        metric: what grades right or wrong; other scores may be shown beside it.
        answer_limit: tokens that an answer may have.
        splits: ``tuning`` and ``evaluation``, some also ``train``. No two share a document, a question or a group.
        extractive: whether the answer's own words stand in the gold documents.
        skipped: of what a file holds, what no item has, and how much of it, by the reason.
    """

    @property
    def name(self) -> str: ...

    @property
    def system(self) -> str: ...

    @property
    def metric(self) -> Metric: ...

    @property
    def answer_limit(self) -> int: ...

    @property
    def splits(self) -> tuple[str, ...]: ...

    @property
    def extractive(self) -> bool: ...

    @property
    def skipped(self) -> Mapping[str, int]: ...

    def items(self, split: str, count: int | None = None, *, seed: int = 0) -> list[Item]:
        """The first `count` items of a split; a smaller count is a head of a larger.

        Args:
            count: None is all of a file, or as many as the task makes by itself. A file may have fewer.
            seed: of what is drawn: order and company of the gold documents, never which questions a file has.

        Raises:
            InputError: an unknown split, one without questions, a count below 1.
        """
        ...
