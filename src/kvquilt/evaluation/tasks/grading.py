"""How one prediction is graded: a score by name, and the form of the prediction that it looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.checks import check_name, check_share
from kvquilt.evaluation.tasks.metrics import (
    bare,
    bare_value,
    contains_em,
    exact_literal,
    marked,
    recall,
    squad_em,
    squad_f1,
)

# Scores of one item, each from 0 to 1. `micro_f1_bag` is one of a corpus and has no place here.
GRADERS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "contains_em": contains_em,
    "squad_em": squad_em,
    "squad_f1": squad_f1,
    "hotpotqa_f1": partial(squad_f1, closed=True),
    "recall": recall,
    "exact_literal": exact_literal,
}
FORMS: dict[str, Callable[[str], str]] = {
    "whole": str,
    "bare": bare,
    "bare_value": bare_value,
    "marked": marked,
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A task's own metric.

    Attributes:
        grader: of `GRADERS`.
        form: of `FORMS`, what is taken of the prediction.
        right: the least score that counts as a right answer.

    Raises:
        InputError: no such grader or form; a threshold of 0, which every answer reaches, or outside 0 to 1.
    """

    grader: str
    form: str = "whole"
    right: float = 1.0

    def __post_init__(self) -> None:
        check_name("grader", self.grader, GRADERS)
        check_name("form", self.form, FORMS)
        check_share("right", self.right)
        if not self.right:
            raise InputError("right", "must be above 0: else every answer is right", self.right)

    def score(self, prediction: str, answers: Sequence[str]) -> float:
        """From 0 to 1."""
        return GRADERS[self.grader](FORMS[self.form](prediction), answers)

    def is_right(self, prediction: str, answers: Sequence[str]) -> bool:
        return self.score(prediction, answers) >= self.right
