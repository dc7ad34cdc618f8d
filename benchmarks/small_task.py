"""Recall with the structure of Biography, small enough for a model that is trained from scratch in minutes.

One document is one invented person: the full name once, at the start, then one sentence per attribute under a pronoun,
in shuffled order and in one of several wordings. A friend is named in every document, and he is often the subject of
another one, so a mention alone does not tell whom a document is about. The question names a person and an attribute;
the answer is the bare value. Every pair of given and family name belongs to one split.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvquilt.evaluation.item import Item
from kvquilt.prompt import Document

SYSTEM = "Answer with the bare value."
_GIVEN = """
Adela Bastian Corin Dalia Edvard Fenna Gideon Halina Ivo Jorun Kasimir Leonie Matthis Nerea Odalys Piotr Quirin
Rosalba Severin Tamsin
""".split()
_FAMILY = """
Abernow Brackvale Cattermoor Dunsteel Everholt Farrowick Glimmerby Harkstone Ingelwood Jarrowby Kestermann
Lindqvar Morrowind Nightvale Oxenfeld Pellerin Quillmar
Ravenscar Stadlhof Tarnbrook
""".split()
_VALUES = {
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
    "friend": _GIVEN,
}
_WORDINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "city": (("{p} lives in {v}.", "{p} has a home in {v}."), ("Where does {n} live?", "Which town is home to {n}?")),
    "birth place": (("{p} was born in {v}.", "{p} comes from {v}."), ("Where was {n} born?", "From where is {n}?")),
    "employer": (("{p} works for {v}.", "{p} earns money at {v}."), ("Who employs {n}?", "Which firm pays {n}?")),
    "field": (("{p} studied {v}.", "{p} knows much about {v}."), ("What did {n} study?", "Which subject knows {n}?")),
    "friend": (("{p} often meets {v}.", "{p} is a friend of {v}."), ("Whom does {n} meet?", "Who is a friend of {n}?")),
}
_PRONOUNS = ("She", "He")
_MOST = 10  # people in one prompt


@dataclass(frozen=True, slots=True)
class Exercise:
    """Several questions over the same documents, each with its bare answer and the index of its document."""

    documents: tuple[Document, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    gold: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    facts: dict[str, str]
    text: str


def words() -> tuple[str, ...]:
    """Texts that hold every word of the task with what stands before it, for a tokenizer of whole words."""
    values = [v for pool in _VALUES.values() for v in pool]
    texts = [SYSTEM, "\n\n", "\nQuestion:", "\nAnswer:", *_GIVEN, *(f" {w}" for w in [*_GIVEN, *_FAMILY, *values])]
    texts += [f" {p}" for p in _PRONOUNS]
    for sentences, questions in _WORDINGS.values():
        texts += [f" {s.format(p='She', v='')}" for s in sentences] + [f" {q.format(n='')}" for q in questions]
    return tuple(texts)


def people(draw: random.Random, split: str, count: int, attributes: int = len(_VALUES)) -> list[Person]:
    """People with distinct given and family names and values, the same random choice of attributes for all."""
    kinds = draw.sample(list(_VALUES), attributes)
    names = _names(draw, split, count)
    columns = {k: draw.sample(_VALUES[k], count) for k in kinds if k != "friend"}
    made = []
    for n, (given, family) in enumerate(names):
        facts = {k: _friend(draw, given, names) if k == "friend" else columns[k][n] for k in kinds}
        pronoun, order = draw.choice(_PRONOUNS), draw.sample(kinds, len(kinds))
        sentences = [draw.choice(_WORDINGS[k][0]).format(p=pronoun, v=facts[k]) for k in order]
        made.append(Person(f"{given} {family}", facts, f"{given} {family}. " + " ".join(sentences)))
    return made


def exercises(
    split: str, count: int, documents: int, questions: int, seed: int = 0, attributes: int = len(_VALUES)
) -> list[Exercise]:
    """`count` sets of documents, each with `questions` different ones (or as many as there are facts)."""
    made = []
    for n in range(count):
        draw = random.Random(f"small-{split}-{documents}-{seed}-{n}")
        some = people(draw, split, documents, attributes)
        pairs = [(i, kind) for i, person in enumerate(some) for kind in person.facts]
        asked = draw.sample(pairs, min(questions, len(pairs)))
        exercise = Exercise(
            documents=tuple(Document(person.text, id=person.name) for person in some),
            questions=tuple(draw.choice(_WORDINGS[kind][1]).format(n=some[i].name) for i, kind in asked),
            answers=tuple(some[i].facts[kind] for i, kind in asked),
            gold=tuple(i for i, _ in asked),
        )
        made.append(exercise)
    return made


def items(split: str, count: int, documents: int, seed: int = 0) -> list[Item]:
    """One question per set of documents, its gold position uniform; the group is the person asked about."""
    return [
        Item(
            id=f"small-{split}-{documents}-{seed}-{n}",
            documents=e.documents,
            question=e.questions[0],
            answers=e.answers,
            gold=e.gold,
            group=e.documents[e.gold[0]].id,
            task="small",
        )
        for n, e in enumerate(exercises(split, count, documents, 1, seed))
    ]


def _names(draw: random.Random, split: str, count: int) -> list[tuple[str, str]]:
    """Pairs of the split in which no given and no family name stands twice; a fourth of all pairs is for testing."""
    if split not in ("train", "test"):
        raise ValueError("split: must be train or test")
    if count > _MOST:
        raise ValueError(f"count: at most {_MOST} people with distinct names")
    made: list[tuple[int, int]] = []
    while len(made) < count:
        given, family = draw.randrange(len(_GIVEN)), draw.randrange(len(_FAMILY))
        mine = ((given + family) % 4 == 0) == (split == "test")
        if mine and all(given != a and family != b for a, b in made):
            made.append((given, family))
    return [(_GIVEN[a], _FAMILY[b]) for a, b in made]


def _friend(draw: random.Random, given: str, names: list[tuple[str, str]]) -> str:
    """Mostly the subject of another document of the same prompt."""
    near = [name for name, _ in names if name != given]
    return draw.choice(near if near and draw.random() < 0.7 else [name for name in _GIVEN if name != given])
