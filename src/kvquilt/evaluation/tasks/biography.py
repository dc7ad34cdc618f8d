"""The Biography task: invented people, one document each, and questions about one fact of one of them.

The published form (SemPIC, KV Packet) with names, values and wording of our own. Same arguments, same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.biography_words import ATTRIBUTES, FAMILY, GIVEN, HE, POOLS, QUESTIONS, SENTENCES, date
from kvquilt.evaluation.tasks.checks import check_count, check_name
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.splits import SIZES
from kvquilt.training.exercise import Exercise

SYSTEM = "Answer the question from the documents with the bare value only: no sentence, no other word."
_SPLITS = ("train", "tuning", "test", "evaluation")
_FEWEST = 20  # people: below it a split would be empty


@dataclass(frozen=True, slots=True)
class Person:
    """One invented person.

    Attributes:
        facts: attribute -> every accepted form of its value, the one that the document states first.
    """

    index: int
    given: str
    family: str
    facts: dict[str, tuple[str, ...]]
    document: Document

    @property
    def name(self) -> str:
        return f"{self.given} {self.family}"


@dataclass(frozen=True, slots=True)
class BiographyTask:
    """People, split so that nobody stands in two splits: the first half trains and tunes (9 : 1), the second tests.

    One wording of every sentence and of every question occurs in the test split only, which as a task's split is called
    ``evaluation``.

    Attributes:
        random_seed: other seeds give other people.
        people: how many there are; made when asked for.
        sentences: ``shuffled``, or ``given``: every document states its facts in the same order.
        name_in: ``every`` sentence, or the ``first`` only, with pronouns after it: a fact then belongs to a name that
            stands sentences before it.
        documents: how many people an item has, if nobody says.

    Raises:
        InputError: a setting out of its range.
    """

    random_seed: int = 0
    people: int = 2000
    sentences: Literal["shuffled", "given"] = "shuffled"
    name_in: Literal["every", "first"] = "every"
    documents: int = 5

    name: ClassVar[str] = "biography"
    system: ClassVar[str] = SYSTEM
    metric: ClassVar[Metric] = Metric("contains_em")
    answer_limit: ClassVar[int] = 32
    splits: ClassVar[tuple[str, ...]] = ("train", "tuning", "evaluation")
    extractive: ClassVar[bool] = True
    skipped: ClassVar[Mapping[str, int]] = {}

    def __post_init__(self) -> None:
        check_count("people", self.people, _FEWEST, len(GIVEN) * len(FAMILY))
        check_name("sentences", self.sentences, ("shuffled", "given"))
        check_name("name_in", self.name_in, ("every", "first"))
        check_count("documents", self.documents, 1)

    def split(self, split: str) -> range:
        """The indices of a split's people."""
        check_name("split", split, _SPLITS)
        half = self.people // 2
        trained = half * 9 // 10
        test = range(half, self.people)
        return {"train": range(trained), "tuning": range(trained, half)}.get(split, test)

    def person(self, index: int) -> Person:
        """Person `index`, from a generator of random numbers of their own."""
        check_count("index", index, 0, self.people - 1)
        draw = random.Random(f"biography person {self.random_seed} {index}")
        given, family = _names(self.random_seed, self.people)[index]
        # days of two digits: "1 May 1950" would stand inside "11 May 1950"
        facts = {"birth date": date(draw.randint(10, 28), draw.randint(1, 12), draw.randint(1940, 2004))}
        facts |= {attribute: (draw.choice(pool),) for attribute, pool in POOLS.items()}
        test = index in self.split("test")
        stated = [(draw.choice(_wordings(SENTENCES[a], test)), forms[0]) for a, forms in facts.items()]
        if self.sentences == "shuffled":
            draw.shuffle(stated)
        texts = []
        for place, (sentence, value) in enumerate(stated):
            named = place == 0 or self.name_in == "every"
            texts.append(sentence.format(v=value, **_mention(given, family, named)))
        document = Document(" ".join(texts), id=f"biography-{self.random_seed}-{index}")
        return Person(index, given, family, facts, document)

    def items(
        self,
        split: str,
        count: int | None = None,
        documents: int | None = None,
        seed: int = 0,
        among: int | None = None,
    ) -> list[Item]:
        """Questions about one fact of one person each, among others of the same split.

        Everybody is asked about once before anybody is twice. Attribute and place of the target are uniform. Family
        names differ within an item, and no other document states the answer. A smaller `count` is a head of a larger.

        Args:
            count: 128 of the tuning split, 256 of the others, if nobody says.
            documents: the task's own number, if nobody says.
            among: only so many people of the split, so that documents come up again and again, as they do in use.

        Raises:
            InputError: an unknown split, a count or number of documents below 1, more documents than the split has
                different people for.
        """
        members = self.split(split)[:among]
        count = SIZES.get(split, SIZES["evaluation"]) if count is None else count
        documents = self.documents if documents is None else documents
        check_count("count", count, 1)
        check_count("documents", documents, 1)
        split = "test" if split == "evaluation" else split
        draw = random.Random(f"biography items {self.random_seed} {split} {documents} {seed}")
        targets = draw.sample(members, len(members))
        made = []
        for n in range(count):
            target = self.person(targets[n % len(targets)])
            attribute = draw.choice(ATTRIBUTES)
            question = draw.choice(_wordings(QUESTIONS[attribute], split == "test")).format(n=target.name)
            place = draw.randrange(documents)
            chosen = self._company([target], documents, members, draw, attribute)
            chosen.insert(place, chosen.pop(0))
            texts = tuple(person.document for person in chosen)
            name = f"biography-{split}-{documents}-{seed}-{n}"
            group = target.document.id
            answers = target.facts[attribute]
            made.append(Item(name, texts, question, answers, (place,), group, "biography", attribute))
        return made

    def exercises(
        self, split: str, count: int, documents: int | Sequence[int] = (2, 3, 5, 7), questions: int = 4, seed: int = 0
    ) -> list[Exercise]:
        """Sets of people with `questions` questions each, about different facts, drawn uniformly.

        Args:
            documents: how many people a set has; several numbers take turns.

        Raises:
            InputError: as for `items`; more questions than the smallest set has facts.
        """
        sizes = [documents] if isinstance(documents, int) else list(documents)
        if not sizes:
            raise InputError("documents", "at least one number is needed")
        check_count("count", count, 1)
        for size in sizes:
            check_count("documents", size, 1)
        check_count("questions", questions, 1, min(sizes) * len(ATTRIBUTES))
        members = self.split(split)
        draw = random.Random(f"biography exercises {self.random_seed} {split} {sizes} {questions} {seed}")
        made = []
        for n in range(count):
            size = sizes[n % len(sizes)]
            chosen = self._company([self.person(draw.choice(members))], size, members, draw)
            facts = draw.sample([(person, attribute) for person in chosen for attribute in ATTRIBUTES], questions)
            asked = [draw.choice(_wordings(QUESTIONS[a], split == "test")).format(n=person.name) for person, a in facts]
            made.append(Exercise(tuple(person.document for person in chosen), tuple(asked)))
        return made

    def _company(
        self, chosen: list[Person], size: int, members: range, draw: random.Random, attribute: str | None = None
    ) -> list[Person]:
        """`chosen` and others, `size` in all: other family names, and another value of `attribute` than the first's."""
        first, seen = chosen[0], {chosen[0].index}
        while len(chosen) < size:
            if len(seen) == len(members):
                raise InputError("documents", "more than the split has people that can stand together", size)
            index = draw.choice(members)
            if index in seen:
                continue
            seen.add(index)
            other = self.person(index)
            known = other.family in {person.family for person in chosen}
            if not known and (attribute is None or other.facts[attribute] != first.facts[attribute]):
                chosen.append(other)
        return chosen


@lru_cache(maxsize=8)
def _names(random_seed: int, people: int) -> list[tuple[str, str]]:
    """Pairs of a given and a family name, no pair twice."""
    pairs = random.Random(f"biography names {random_seed}").sample(range(len(GIVEN) * len(FAMILY)), people)
    return [(GIVEN[pair // len(FAMILY)], FAMILY[pair % len(FAMILY)]) for pair in pairs]


def _mention(given: str, family: str, named: bool) -> dict[str, str]:
    """The person as subject and as owner, by name or by pronoun."""
    name = f"{given} {family}"
    if named:
        return {"S": name, "s": name, "P": f"{name}'s", "p": f"{name}'s"}
    subject, owner = ("He", "His") if given in HE else ("She", "Her")
    return {"S": subject, "s": subject.lower(), "P": owner, "p": owner.lower()}


def _wordings(wordings: tuple[str, ...], test: bool) -> tuple[str, ...]:
    """The last is kept for the test split."""
    return wordings if test else wordings[:-1]
