"""Invented people and questions about them: every name, value and wording is the project's own.

One document is one person: six facts, one sentence each, in shuffled order. The long form adds sentences that carry no
asked fact. People are disjoint between splits, and one wording of every question occurs in the test split only.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass

_GIVEN = """
Adela Bastian Corin Dalia Edvard Fenna Gideon Halina Ivo Jorun Kasimir Leonie Matthis Nerea Odalys Piotr Quirin
Rosalba Severin Tamsin Ulrich Verena Wendel Xenia Yannick Zelda Anselm Birgit Casper Dorothea Emeric Freya
Gaspar Henrike Ilario Jolanta Kilian Liesl Marius Nadja
""".split()
_FAMILY = """
Abernow Brackvale Cattermoor Dunsteel Everholt Farrowick Glimmerby Harkstone Ingelwood Jarrowby Kestermann
Lindqvar Morrowind Nightvale Oxenfeld Pellerin Quillmar Ravenscar Stadlhof Tarnbrook Umberleigh Vantongeren
Wetherlam Yarbright Zollikon Ashgrove Birkendal Cloverby Drachenau Elmsworth Fosterlund Graypool Hollenbach
Islewater Juniperfeld Kronwall Lakemore Mistelbach Norwick Ottermead Pinehurst Quarrington Rosswald Silverdal
Thornbury Ullswick Vesterbo Winterlee Yewcastle Zandvoort
""".split()
_PLACES = """
Arlenbruck Bexmouth Calderport Dornwick Eskvale Fennhaven Galloway-on-Tarn Hexenau Ivelstad Jasperton Krumlin
Lorvik Meribel Norrdal Olmstead Perleberg Quendor Ruskholm Selbu Tolvanen Umbria-del-Sol Varnsdorf Wexcombe
Ystradell Zernez Auberive Brennick Castelmar Drumlough Eibensee
""".split()
_CITIES = """
Halvorsen Nieuwmarkt Porto-Aldo Saltmere Kingsferry Ravnholm Tessaloma Vandermeer Cold-Harbour Estrada Monteluce
Oberwalden Pinecliff Rotherdam Sandvika Trelleborg Ulverston Vesoul Whitstead Zutphen Alderney Brixen Corvara
Dinkelsby Ebeltoft Falsterbo Grindelau Hameln Ingolby Jonkop
""".split()
_FIELDS = """
astronomy botany metallurgy musicology hydrology jurisprudence linguistics cartography dentistry horticulture
mathematics philosophy robotics sociology zoology archaeology cryptography meteorology pharmacology typography
""".split()
_UNIVERSITIES = [
    f"{a} {b}"
    for a in ("Northlight", "Saint Orwen", "Greyfriars", "Lakeside", "Old Harbour")
    for b in ("College", "Institute", "Academy", "Polytechnic")
]
_EMPLOYERS = [
    f"{a}{b}"
    for a in ("Brindle", "Cobalt", "Ferro", "Helio", "Juno", "Lumen", "Nimbus", "Quarto")
    for b in ("works", "soft", "line", "forge", "grid")
]
_MONTHS = """
January February March April May June July August September October November December
""".split()

ATTRIBUTES = {
    "birth date": (
        ["{n} was born on {v}.", "The birthday of {n} is {v}.", "{v} is the day on which {n} came into the world."],
        ["On which date was {n} born?", "What is the birth date of {n}?", "When did {n} come into the world?"],
    ),
    "birth place": (
        ["{n} comes from {v}.", "The birthplace of {n} is {v}.", "{n} first saw the light of day in {v}."],
        ["Where was {n} born?", "What is the birthplace of {n}?", "Which place does {n} come from?"],
    ),
    "city": (
        ["{n} lives in {v} today.", "The home of {n} is now in {v}.", "These days {n} resides in {v}."],
        ["In which city does {n} live today?", "Where does {n} live now?", "Which city is the present home of {n}?"],
    ),
    "university": (
        ["{n} studied at {v}.", "{n} is a graduate of {v}.", "The alma mater of {n} is {v}."],
        ["Where did {n} study?", "Which school did {n} graduate from?", "What is the alma mater of {n}?"],
    ),
    "field": (
        ["{n} holds a degree in {v}.", "The subject that {n} studied is {v}.", "{n} was trained in {v}."],
        ["Which subject did {n} study?", "What is the degree of {n} in?", "In which field was {n} trained?"],
    ),
    "employer": (
        ["{n} works for {v}.", "The employer of {n} is {v}.", "{n} earns a living at {v}."],
        ["Who does {n} work for?", "What is the employer of {n}?", "At which company does {n} earn a living?"],
    ),
}
_FILLER = [
    "{n} keeps a small garden and is proud of the tomatoes that grow in it.",
    "Friends describe {n} as patient, a little stubborn and always ready to help.",
    "On most mornings {n} walks a long way before breakfast, whatever the weather.",
    "{n} collects old postcards and has learned to repair clocks as a pastime.",
    "In the evenings {n} likes to cook for guests and to talk until late.",
    "{n} once took part in a rowing race and finished second, which is still mentioned at every party.",
    "A neighbour remembers that {n} can whistle any tune after hearing it a single time.",
    "{n} reads three newspapers a week and answers every letter by hand.",
    "For years {n} has sung in a choir that meets on Thursdays.",
    "{n} dislikes loud places and prefers the train to the car.",
    "When there is snow, {n} builds a figure in front of the house for the children of the street.",
    "{n} has never owned a television and says that nothing is missing.",
    "The dog of {n} is known for carrying the shopping home.",
    "{n} can name the constellations and shows them to anyone who asks.",
]


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    facts: dict[str, str]
    short: str
    long: str


@dataclass(frozen=True, slots=True)
class Item:
    """One question: people in prompt order, the index of the one it is about, and the answer."""

    people: tuple[Person, ...]
    gold: int
    question: str
    answer: str


def people(split: str, count: int, seed: int = 0) -> list[Person]:
    """`count` people of ``train`` or ``test``; family names are unique within a split and never shared."""
    half = len(_FAMILY) // 2
    family = _FAMILY[:half] if split == "train" else _FAMILY[half:]
    if count > len(family):
        raise ValueError(f"count: at most {len(family)} people with distinct family names")
    draw = random.Random(f"people-{split}-{seed}")
    given = draw.sample(_GIVEN, count)
    return [_person(f"{given[i]} {family[i]}", random.Random(f"{split}-{seed}-{i}")) for i in range(count)]


def _person(name: str, draw: random.Random) -> Person:
    facts = {
        "birth date": f"{draw.randint(1, 28)} {draw.choice(_MONTHS)} {draw.randint(1940, 2004)}",
        "birth place": draw.choice(_PLACES),
        "city": draw.choice(_CITIES),
        "university": draw.choice(_UNIVERSITIES),
        "field": draw.choice(_FIELDS),
        "employer": draw.choice(_EMPLOYERS),
    }
    sentences = [draw.choice(ATTRIBUTES[a][0]).format(n=name, v=v) for a, v in facts.items()]
    draw.shuffle(sentences)
    filler = [s.format(n=name) for s in draw.sample(_FILLER, len(_FILLER))]
    long = list(filler)
    for sentence in sentences:
        long.insert(draw.randint(0, len(long)), sentence)
    return Person(name, facts, " ".join(sentences), " ".join(long))


def items(split: str, count: int, documents: int, seed: int = 0) -> list[Item]:
    """Questions with a uniform gold position; the last wording of each question is kept for the test split."""
    pool = people(split, 24, seed)
    draw = random.Random(f"items-{split}-{documents}-{seed}")
    made = []
    for _ in range(count):
        chosen = draw.sample(pool, documents)
        gold = draw.randrange(documents)
        attribute = draw.choice(list(ATTRIBUTES))
        wordings = ATTRIBUTES[attribute][1]
        wording = draw.choice(wordings if split == "test" else wordings[:-1])
        person = chosen[gold]
        made.append(Item(tuple(chosen), gold, wording.format(n=person.name), person.facts[attribute]))
    return made


def shared_words(text: str, gold: str) -> dict[str, int]:
    """Words of an answer that are right (``tp``), that are not (``fp``), and that are missing (``fn``)."""
    predicted, wanted = _bag(text), _bag(gold)
    shared = (predicted & wanted).total()
    return {"tp": shared, "fp": predicted.total() - shared, "fn": wanted.total() - shared}


def _bag(text: str) -> Counter[str]:
    """Words of a short answer: first line, lower case, what stands behind the first copula or preposition."""
    line = text.strip().split("\n")[0].lower().strip().rstrip(".")
    line = re.sub(r"^.*?\b(?:is|was|are|in|on|at|for|from)\b\s+", "", line)
    return Counter(line.split())
