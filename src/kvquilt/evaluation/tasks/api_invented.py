"""An invented library: nobody knows it by heart, so without the documents no answer is right but by luck.

Modules come in pairs that have functions of the same names, with other parameters, defaults, exceptions and versions:
near-duplicates that only the module's name tells apart.
"""

from __future__ import annotations

import random
from functools import lru_cache

from kvquilt.evaluation.tasks.api_library import Entry, Fact, literals
from kvquilt.evaluation.tasks.api_words import (
    FIRST,
    MODULES,
    NOUNS,
    PARAMETERS,
    SECOND,
    SHADES,
    THINGS,
    TRAITS,
    VERBS,
)

_FUNCTIONS = 6  # of a module
_PAIRS = len(MODULES) // 2


@lru_cache(maxsize=8)
def invented(random_seed: int) -> list[tuple[Entry, ...]]:
    """Pairs of modules, each as all entries of both. Classes and exceptions occur once in the whole library."""
    draw = random.Random(f"invented library {random_seed}")
    modules = draw.sample(MODULES, len(MODULES))
    calls = draw.sample([(verb, noun) for verb in VERBS for noun in NOUNS], _PAIRS * _FUNCTIONS)
    classes = draw.sample([trait + thing for trait in TRAITS for thing in THINGS], 2 * len(calls))
    faults = draw.sample([f"{trait}{thing}Error" for trait in TRAITS for thing in THINGS], 2 * len(calls))
    pairs = []
    for n in range(_PAIRS):
        own = calls[n * _FUNCTIONS : (n + 1) * _FUNCTIONS]
        twins = [(module, call) for module in modules[2 * n : 2 * n + 2] for call in own]
        versions = draw.sample([f"{major}.{minor}" for major in range(1, 8) for minor in range(1, 20)], len(twins))
        pairs.append(
            tuple(
                _entry(module, *call, classes.pop(), faults.pop(), version, draw)
                for (module, call), version in zip(twins, versions, strict=True)
            )
        )
    return pairs


def _entry(module: str, verb: str, noun: str, returned: str, fault: str, version: str, draw: random.Random) -> Entry:
    name = f"{verb}_{noun}"
    whole, part, text = draw.sample(PARAMETERS, 3)
    settings: list[tuple[str, object]] = [
        (whole, draw.randint(11, 998)),
        (part, draw.randint(101, 989) / 1000),
        (text, draw.choice(SHADES)),
    ]
    draw.shuffle(settings)
    signature = ", ".join(["source", *(f"{parameter}={value!r}" for parameter, value in settings)])
    said = [draw.choice(some).format(v=verb, o=noun, p=draw.choice(settings)[0]) for some in (FIRST, SECOND)]
    lines = [
        f"{module}.{name}({signature})",
        "",
        " ".join(said),
        "",
        "Parameters:",
        f"  source: {noun.title()}",
        *(f"  {parameter}: {type(value).__name__}, default {value!r}" for parameter, value in settings),
        f"Returns: {returned}",
        f"Raises: {fault}",
        f"Since: version {version}",
    ]
    facts = [Fact("default", parameter, literals(value)) for parameter, value in settings]
    facts += [
        Fact("exception", "", (fault,)),
        Fact("function", returned, (name, f"{module}.{name}", f"{name}()", f"{module}.{name}()")),
        Fact("version", "", (version, f"version {version}")),
    ]
    return Entry(module, name, "\n".join(lines), tuple(facts))
