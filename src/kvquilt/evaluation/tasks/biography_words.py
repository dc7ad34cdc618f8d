"""The words of the Biography task: names, values, sentences and questions, all of the project's own making.

No value stands inside another value of any pool, a name, a sentence or a question; the tests hold the pools to it.
In sentences ``{S}`` and ``{s}`` are the person as subject, ``{P}`` and ``{p}`` as owner, capital at a sentence's head.
"""

from __future__ import annotations

from kvquilt.evaluation.tasks.word_lists import joined, words

SHE = words("""
    Ada Adela Alice Amelia Anna Astrid Beatrice Bella Bridget Camilla Carmen Cecilia Clara Cora Daisy Dalia Diana
    Dora Edith Elena Elsa Emma Esther Eva Fiona Flora Freya Grace Greta Hannah Helen Ida Ingrid Irene Iris Jane Julia
    Karin Laura Lena Linda Lucy Mabel Maria Martha Maya Miriam Nadia Nina Nora Olga Paula Rita Rosa Ruth Sara Selma
    Sofia Stella Tara Tilda Tilly Ursula Vera Wilma Zelda
    """)
HE = words("""
    Adam Alan Albert Anton Arthur Bernard Boris Bruno Caleb Carl Casper Conrad Cyril Daniel David Dennis Edgar Edmund
    Elias Emil Eric Felix Frank Fritz Gerald Gideon Gustav Hans Harold Hector Henry Hugo Igor Isaac Ivan Jacob Jasper
    Jonas Julian Karl Klaus Leo Leon Louis Lucas Magnus Marcus Martin Max Miles Nathan Neil Oliver Oscar Otto Paul
    Peter Ralph Roland Rufus Simon Stefan Timon Tobias Victor Walter
    """)
GIVEN = SHE + HE
FAMILY = joined(
    "Ash Birch Black Bright Clay Cold Cross Crow Dark East Fair Fern Fox Frost Gold Green Grey Hart Heath High Hill "
    "Iron Lark Marsh",
    "bourne combe croft field hurst ridge shaw stone well wood",
)

_MONTHS = words("January February March April May June July August September October November December")
BIRTH_PLACES = joined(
    "Amber Bram Calder Drum Ember Fallow Gander Harrow Ivel Juniper Kettle Linnet Mallow Nettle Otter Pepper Quill "
    "Rush Saffron Thistle Umber",
    "by ford stead wick",
)
CITIES = joined(
    "Aven Bry Cas Dun Eth Fal Gar Hel Is Jor Kal Lun Mer Nev Pal Quin Ros Sel Tor Val Zan",
    "grad haven minster mont",
)
UNIVERSITIES = tuple(
    f"{name} {kind}"
    for name in words(
        "Beacon Castle Harbour Kingfisher Lakeside Lantern Meadow Northlight Orchard Pilgrim Riverside Seagull Summit "
        "Swan Tower Windmill"
    )
    for kind in ("Academy", "College", "Institute", "Polytechnic")
)
FIELDS = words("""
    accounting acoustics agronomy algebra anatomy archaeology astronomy botany cartography ceramics cryptography
    dentistry ecology economics forestry genetics geography geology geometry hydrology immunology journalism
    jurisprudence linguistics mathematics metallurgy meteorology musicology nursing nutrition optics painting
    pharmacology philosophy photography robotics sculpture sociology statistics surgery theology toxicology zoology
    """)
EMPLOYERS = joined(
    "Alpha Brindle Cobalt Delta Echo Ferro Globe Helio Indigo Juno Krypton Lumen Metro Nimbus Omni Proto Quarto Rapid "
    "Solar Turbo Ultra",
    "forge gear line soft works",
)

POOLS = {
    "birth place": BIRTH_PLACES,
    "city": CITIES,
    "university": UNIVERSITIES,
    "field": FIELDS,
    "employer": EMPLOYERS,
}
ATTRIBUTES = ("birth date", *POOLS)


def date(day: int, month: int, year: int) -> tuple[str, ...]:
    """A date in every accepted form, the canonical one first; `month` counts from 1."""
    name = _MONTHS[month - 1]
    return (
        f"{day} {name} {year}",
        f"{name} {day}, {year}",
        f"{year}-{month:02}-{day:02}",
        f"{day:02}/{month:02}/{year}",
    )


# The last of each occurs in the test split only.
SENTENCES = {
    "birth date": (
        "{S} was born on {v}.",
        "{P} birthday is on {v}.",
        "{P} date of birth is {v}.",
        "{S} came into the world on {v}.",
        "It was on {v} that {s} was born.",
    ),
    "birth place": (
        "{S} originally comes from {v}.",
        "{P} birthplace is {v}.",
        "{S} was born and raised in {v}.",
        "{P} native town is {v}.",
        "{v} is where {s} was born.",
    ),
    "city": (
        "{S} lives in {v} today.",
        "{P} home is now in {v}.",
        "{S} now resides in the city of {v}.",
        "{P} present city is {v}.",
        "These days {s} can be found in {v}.",
    ),
    "university": (
        "{S} once studied at {v}.",
        "{S} is a graduate of {v}.",
        "{P} university was {v}.",
        "{S} took a degree at {v}.",
        "The diploma on {p} wall is from {v}.",
    ),
    "field": (
        "{S} holds a degree in {v}.",
        "{P} main subject was {v}.",
        "{S} was thoroughly trained in {v}.",
        "{P} field of study was {v}.",
        "As a student, {s} chose {v}.",
    ),
    "employer": (
        "{S} works full time for {v}.",
        "{P} present employer is {v}.",
        "{S} is currently employed at {v}.",
        "{S} earns a living at {v}.",
        "Every month {v} pays {p} salary.",
    ),
}
QUESTIONS = {
    "birth date": (
        "When was {n} born?",
        "On which date was {n} born?",
        "What is the birth date of {n}?",
        "What is {n}'s date of birth?",
        "When did {n} come into the world?",
    ),
    "birth place": (
        "Where was {n} born?",
        "What is the birthplace of {n}?",
        "Which place does {n} come from?",
        "In which town was {n} born?",
        "What is {n}'s native town?",
    ),
    "city": (
        "In which city does {n} live today?",
        "Where does {n} live now?",
        "Which city is the present home of {n}?",
        "What is {n}'s current city?",
        "Where does {n} reside these days?",
    ),
    "university": (
        "Where did {n} study?",
        "Which university did {n} attend?",
        "What is the alma mater of {n}?",
        "At which university was {n} a student?",
        "Which school did {n} graduate from?",
    ),
    "field": (
        "Which subject did {n} study?",
        "What is {n}'s degree in?",
        "In which field was {n} trained?",
        "What was {n}'s field of study?",
        "Which discipline did {n} choose as a student?",
    ),
    "employer": (
        "Who does {n} work for?",
        "What is the employer of {n}?",
        "At which company is {n} employed?",
        "Which company does {n} work for?",
        "Who pays {n}'s salary?",
    ),
}
