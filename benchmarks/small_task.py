"""Recall with the structure of Biography, small enough for a model that is trained from scratch in a minute.

One document is one invented person, one sentence per attribute, in shuffled order and in one of three wordings; the
question names a person and an attribute, the answer is the bare value, one token. Every pair of given and family name
belongs to one split. Words are chosen so that a sentence is four of them: "Adela Abernow inhabits Halvorsen."
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvquilt.document import Document
from kvquilt.evaluation.tasks.item import Item

SYSTEM = "Answer with the bare value."
GIVEN = """
Adela Bastian Corin Dalia Edvard Fenna Gideon Halina Ivo Jorun Kasimir Leonie Matthis Nerea Odalys Piotr Quirin
Rosalba Severin Tamsin
""".split()
FAMILY = """
Abernow Brackvale Cattermoor Dunsteel Everholt Farrowick Glimmerby Harkstone Ingelwood Jarrowby Kestermann
Lindqvar Morrowind Nightvale Oxenfeld Pellerin Quillmar Ravenscar Stadlhof Tarnbrook
""".split()
VALUES = {
    "city": """Halvorsen Nieuwmarkt Saltmere Kingsferry Ravnholm Tessaloma Vandermeer Estrada Monteluce Oberwalden
        Pinecliff Rotherdam Sandvika Trelleborg Ulverston Vesoul Whitstead Zutphen Alderney Brixen""".split(),
    "birth place": """Arlenbruck Bexmouth Calderport Dornwick Eskvale Fennhaven Hexenau Ivelstad Jasperton Krumlin
        Lorvik Meribel Norrdal Olmstead Perleberg Quendor Ruskholm Selbu Tolvanen Varnsdorf""".split(),
    "employer": """Brindleworks Cobaltsoft Ferroline Helioforge Junogrid Lumenworks Nimbusline Quartosoft Brindlegrid
        Cobaltforge Ferroworks Heliosoft Junoline Lumenforge Nimbusgrid Quartoworks Tallowline Umbraforge Vantasoft
        Wrenworks""".split(),
    "field": """astronomy botany metallurgy musicology hydrology jurisprudence linguistics cartography dentistry
        horticulture mathematics philosophy robotics sociology zoology archaeology cryptography meteorology
        pharmacology typography""".split(),
}
VERBS = {
    "city": ("inhabits", "occupies", "favours"),
    "birth place": ("left", "quit", "escaped"),
    "employer": ("serves", "assists", "joined"),
    "field": ("studies", "masters", "teaches"),
}


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    facts: dict[str, str]
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """One set of documents with questions about it, the answers and where they stand."""

    documents: tuple[Document, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    gold: tuple[int, ...]


def words() -> list[str]:
    """Every word that may stand in a prompt, with the blank before it."""
    values = [value for pool in VALUES.values() for value in pool]
    verbs = [verb for all_of in VERBS.values() for verb in all_of]
    return sorted({*GIVEN, *(f" {word}" for word in [*GIVEN, *FAMILY, *values, *verbs])})


def exercises(split: str, count: int, documents: int, questions: int, seed: int = 0) -> list[Asked]:
    """Sets of people of ``train`` or ``test``, questions about different facts; fewer are a head of more."""
    made = []
    for n in range(count):
        draw = random.Random(f"small {split} {documents} {questions} {seed} {n}")
        people = _people(draw, split, documents)
        facts = draw.sample([(i, a) for i in range(documents) for a in VALUES], questions)
        made.append(
            Asked(
                tuple(Document(p.text, id=p.name) for p in people),
                tuple(f"{people[i].name} {draw.choice(VERBS[a])}" for i, a in facts),
                tuple(people[i].facts[a] for i, a in facts),
                tuple(i for i, _ in facts),
            )
        )
    return made


def items(split: str, count: int, documents: int, seed: int = 0) -> list[Item]:
    """One question per set."""
    made = exercises(split, count, documents, 1, seed)
    return [
        Item(f"small-{split}-{seed}-{n}", e.documents, e.questions[0], e.answers, e.gold, f"{n}", "small")
        for n, e in enumerate(made)
    ]


def _people(draw: random.Random, split: str, count: int) -> list[Person]:
    """People whose given names, family names and values all differ."""
    given = draw.sample(range(len(GIVEN)), count)
    family: list[int] = []
    for g in given:
        # a quarter of all pairs of names is kept for the test split
        free = [f for f in range(len(FAMILY)) if ((g + f) % 4 == 0) == (split == "test") and f not in family]
        family.append(draw.choice(free))
    values = {attribute: draw.sample(pool, count) for attribute, pool in VALUES.items()}
    made = []
    for n, (g, f) in enumerate(zip(given, family, strict=True)):
        name, facts = f"{GIVEN[g]} {FAMILY[f]}", {a: values[a][n] for a in VALUES}
        order = draw.sample(list(facts), len(facts))
        made.append(Person(name, facts, " ".join(f"{name} {draw.choice(VERBS[a])} {facts[a]}." for a in order)))
    return made
