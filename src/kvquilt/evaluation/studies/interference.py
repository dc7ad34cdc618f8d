"""The same questions among other company: what stands beside the document that answers, how much of it, and where.

    I0  nothing: the document alone
    I1  documents of another kind: passages of Python's help
    I2  documents of the same kind: other people, other functions
    I3  near-duplicates: the same wording under another name, with other values

Whatever the company, a prompt has about as many tokens: a document of neutral sentences fills up what is missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.studies.near_duplicates import MOST_FUNCTIONS, MOST_PEOPLE, near_functions, near_people
from kvquilt.evaluation.tasks.api_docs import ApiDocsTask
from kvquilt.evaluation.tasks.biography import BiographyTask
from kvquilt.evaluation.tasks.checks import check_count, check_name
from kvquilt.evaluation.tasks.help_topics import HelpTopics
from kvquilt.evaluation.tasks.item import Item

Structure = Literal["I0", "I1", "I2", "I3"]
Place = Literal["first", "middle", "last"]
STRUCTURES: tuple[Structure, ...] = ("I0", "I1", "I2", "I3")
PLACES: tuple[Place, ...] = ("first", "middle", "last")
MOST = {"biography": MOST_PEOPLE, "api_docs": MOST_FUNCTIONS}  # distractors, by kind
KINDS = tuple(MOST)
_LEAST_FILLER = 24  # tokens: less is no document


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting.

    Attributes:
        distractors: how many documents stand beside the target, the filler left out.
        place: where the target stands among all of them.

    Raises:
        InputError: an unknown structure or place; distractors of a target that stands alone, or none beside one.
    """

    structure: Structure
    distractors: int = 0
    place: Place = "first"

    def __post_init__(self) -> None:
        check_name("structure", self.structure, STRUCTURES)
        check_name("place", self.place, PLACES)
        check_count("distractors", self.distractors, 0)
        if (self.structure == "I0") != (self.distractors == 0):
            raise InputError("distractors", "I0 has none, the others at least one", self.distractors)

    @property
    def name(self) -> str:
        return self.structure if self.structure == "I0" else f"{self.structure}-{self.distractors}-{self.place}"


def cells(distractors: Sequence[int], places: Sequence[Place], structures: Sequence[Structure]) -> list[Cell]:
    """Every combination; one cell of I0."""
    beside = [Cell(s, k, place) for s in structures if s != "I0" for k in distractors for place in places]
    return [Cell("I0")] * ("I0" in structures) + beside


@dataclass(frozen=True, slots=True)
class Target:
    """A question and what may stand beside the document that answers it, `most` documents of each kind.

    Attributes:
        item: as its task made it; one document is gold.
        tokens: of a prompt's documents, whatever stands there.
    """

    item: Item
    neutral: tuple[Document, ...]
    same: tuple[Document, ...]
    near: tuple[Document, ...]
    filler: tuple[str, ...]
    tokens: int

    @property
    def document(self) -> Document:
        return self.item.documents[self.item.gold[0]]

    def placed(self, cell: Cell, length: Callable[[str], int]) -> Item:
        """The question in that setting; the smaller company of a kind is part of the larger.

        Raises:
            InputError: more distractors than there are.
        """
        if cell.distractors > len(self.same):
            raise InputError("distractors", f"the target has at most {len(self.same)}", cell.distractors)
        company = {"I0": (), "I1": self.neutral, "I2": self.same, "I3": self.near}[cell.structure]
        others = list(company[: cell.distractors])
        if cell.structure != "I0":
            room = self.tokens - length(self.document.text) - sum(length(d.text) for d in others)
            others += self._filled(room, length)
        random.Random(f"company {self.item.id} {cell.distractors}").shuffle(others)
        at = {"first": 0, "middle": (len(others) + 1) // 2, "last": len(others)}[cell.place]
        others.insert(at, self.document)
        name = f"{self.item.id}-{cell.name}"
        return replace(self.item, id=name, documents=tuple(others), gold=(at,), kind=cell.name)

    def _filled(self, room: int, length: Callable[[str], int]) -> list[Document]:
        said: list[str] = []
        for sentence in self.filler:
            if length(" ".join([*said, sentence])) > room:
                break
            said.append(sentence)
        text = " ".join(said)
        return [Document(text, id="filler")] if said and length(text) >= _LEAST_FILLER else []


def task_of(kind: str, most: int, seed: int = 0) -> BiographyTask | ApiDocsTask:
    """The task whose questions are asked, with `most` other documents beside the one that answers.

    Raises:
        InputError: an unknown kind.
    """
    check_name("kind", kind, KINDS)
    if kind == "biography":
        return BiographyTask(random_seed=seed, documents=most + 1)
    return ApiDocsTask(source="invented", documents=most + 1, random_seed=seed)


def targets(
    kind: str, count: int, most: int, length: Callable[[str], int], split: str = "evaluation", seed: int = 0
) -> list[Target]:
    """Questions with company of every kind; a smaller `count` is a head of a larger.

    Questions whose answer is the same for a near-duplicate, such as a function's own name, are left out.

    Args:
        most: distractors of the largest setting.
        length: measures a text in tokens.

    Raises:
        InputError: an unknown kind or split; a count below 1, more distractors than the kind has.
    """
    check_count("count", count, 1)
    task, topics = task_of(kind, most, seed), HelpTopics(seed)
    passages, sentences = topics.documents("test"), topics.sentences("test")
    made: list[Target] = []
    for item in task.items(split, 2 * count + 8, seed=seed):
        near = near_people(task, item, most) if isinstance(task, BiographyTask) else near_functions(task, item, most)
        if any(answer in document.text for answer in item.answers for document in near):
            continue
        draw = random.Random(f"neutral {item.id}")
        neutral = draw.sample([p for p in passages if not any(a in p.text for a in item.answers)], most)
        first = draw.randrange(len(sentences))
        filler = [*sentences[first:], *sentences[:first]]
        filler = [each for each in filler if not any(answer in each for answer in item.answers)]
        same = tuple(d for n, d in enumerate(item.documents) if n not in item.gold)
        widest = max(sum(length(d.text) for d in company) for company in (neutral, same, near))
        tokens = length(item.documents[item.gold[0]].text) + widest
        made.append(Target(item, tuple(neutral), same, near, tuple(filler), tokens))
        if len(made) == count:
            break
    return made
