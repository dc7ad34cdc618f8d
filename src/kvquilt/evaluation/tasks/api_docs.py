"""Documentation of functions as documents; answers are exact identifiers and literals, taken from code."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.api_invented import invented
from kvquilt.evaluation.tasks.api_library import QUESTIONS, Entry, Fact
from kvquilt.evaluation.tasks.api_stdlib import stdlib
from kvquilt.evaluation.tasks.checks import check_count, check_name
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.splits import SIZES, SPLITS, check_asked, in_turns


def is_stated(answer: str, text: str) -> bool:
    """Whether the name or value stands there whole: 4.7 is neither in 14.7 nor in 4.7.1."""
    return answer in text and bool(re.search(rf"(?<!\w)(?<!\d\.){re.escape(answer)}(?!\w|\.\w)", text))


@dataclass(frozen=True, slots=True)
class ApiDocsTask:
    """Questions about functions. Half of the modules tune, the others evaluate. Group is the module.

    Kinds of facts take turns; an item has the kind of its fact. No other document of an item has the answer in it, but
    for a twin. One wording of every question occurs in evaluation only.

    Attributes:
        source: the ``stdlib``'s own help texts, or an ``invented`` library (see `api_stdlib`, `api_invented`).
        documents: how many an item has.
        company: other functions of the ``module``, filled up with those of others; of ``others`` alone; or, of the
            invented library, the function of the same name in another module and then as ``module``: ``twins``.
        random_seed: other seeds give another split, and another invented library.

    Raises:
        InputError: a setting out of its range.
    """

    source: Literal["stdlib", "invented"] = "stdlib"
    documents: int = 5
    company: Literal["module", "others", "twins"] = "module"
    random_seed: int = 0

    name: ClassVar[str] = "api_docs"
    system: ClassVar[str] = (
        "Answer the question from the documentation with the bare name or value, written as in code: no sentence."
    )
    metric: ClassVar[Metric] = Metric("exact_literal")
    answer_limit: ClassVar[int] = 32
    splits: ClassVar[tuple[str, ...]] = SPLITS
    extractive: ClassVar[bool] = True
    skipped: ClassVar[Mapping[str, int]] = {}

    def __post_init__(self) -> None:
        check_name("source", self.source, ("stdlib", "invented"))
        check_name("company", self.company, ("module", "others", "twins"))
        check_count("documents", self.documents, 1)
        if self.source == "stdlib" and self.company == "twins":
            raise InputError("company", "twins are of the invented library only: source=invented", self.company)

    def entries(self, split: str) -> list[Entry]:
        """A split's functions.

        Raises:
            InputError: an unknown split.
        """
        check_name("split", split, SPLITS)
        bundles = stdlib() if self.source == "stdlib" else invented(self.random_seed)
        drawn = random.Random(f"api docs split {self.random_seed}").sample(bundles, len(bundles))
        half = len(drawn) // 2
        return [entry for bundle in (drawn[:half] if split == "tuning" else drawn[half:]) for entry in bundle]

    def items(self, split: str, count: int | None = None, *, seed: int = 0) -> list[Item]:
        """As every task's. Every fact is asked for once before any is twice, which only a `count` leads to.

        Raises:
            InputError: also more documents than the split has without the answer in them.
        """
        check_asked(count)
        entries = self.entries(split)
        draw = random.Random(f"api docs {self.source} {self.random_seed} {split} {seed}")
        kinds = []
        for kind in QUESTIONS:
            facts = [(entry, fact) for entry in entries for fact in entry.facts if fact.kind == kind]
            kinds.append(draw.sample(facts, len(facts)))
        asked = in_turns(kinds)
        count = min(SIZES[split], len(asked)) if count is None else count
        return [self._item(split, n, seed, *asked[n % len(asked)], entries) for n in range(count)]

    def _item(self, split: str, n: int, seed: int, target: Entry, fact: Fact, entries: list[Entry]) -> Item:
        draw = random.Random(f"api docs item {self.source} {self.company} {self.random_seed} {split} {seed} {n}")
        wordings = QUESTIONS[fact.kind] if split == "evaluation" else QUESTIONS[fact.kind][:-1]
        chosen = [target, *self._company(target, fact, entries, draw)]
        draw.shuffle(chosen)
        made = tuple(Document(entry.text, id=f"{entry.module}.{entry.name}") for entry in chosen)
        question = target.question(fact, draw.choice(wordings))
        name = f"api-{self.source}-{split}-{seed}-{n}"
        return Item(name, made, question, fact.answers, (chosen.index(target),), target.module, self.name, fact.kind)

    def _company(self, target: Entry, fact: Fact, entries: list[Entry], draw: random.Random) -> list[Entry]:
        answer = fact.answers[0]
        fit = [entry for entry in entries if entry is not target and not is_stated(answer, entry.text)]
        near = [entry for entry in fit if entry.module == target.module and self.company != "others"]
        twins = [entry for entry in entries if entry.name == target.name and entry.module != target.module]
        first = twins if self.company == "twins" else []
        rest = [entry for entry in fit if entry.module != target.module and entry not in first]
        ordered = [*first, *draw.sample(near, len(near)), *draw.sample(rest, len(rest))]
        if len(ordered) < self.documents - 1:
            raise InputError("documents", "more than the split has without the answer in them", self.documents)
        return ordered[: self.documents - 1]
