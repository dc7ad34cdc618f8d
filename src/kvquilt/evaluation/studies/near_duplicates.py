"""Near-duplicates of a document that answers: another name, the same wording, other values where it counts."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Mapping

from kvquilt.document import Document
from kvquilt.evaluation.tasks.api_docs import ApiDocsTask
from kvquilt.evaluation.tasks.api_library import Fact
from kvquilt.evaluation.tasks.api_words import MODULES, SHADES, THINGS, TRAITS
from kvquilt.evaluation.tasks.biography import BiographyTask, Person
from kvquilt.evaluation.tasks.biography_words import ATTRIBUTES, GIVEN, POOLS, date
from kvquilt.evaluation.tasks.checks import check_count
from kvquilt.evaluation.tasks.item import Item

# as many as differ in whatever is asked: one value of each kind, and one name, is the target's own
MOST_PEOPLE = min(len(set(pool)) for pool in (GIVEN, *POOLS.values())) - 1
MOST_FUNCTIONS = min(len(set(MODULES)), len(set(SHADES))) - 1


def near_people(task: BiographyTask, item: Item, count: int) -> tuple[Document, ...]:
    """Of the person that `item` asks about: the family name and four facts are the same, what is asked for is not.

    The six facts are told in the same words; one more than the one asked for differs. No two state the same value of
    it, nor have the same given name.

    Raises:
        InputError: more than there are.
    """
    check_count("distractors", count, 1, MOST_PEOPLE)
    target = _person(task, item)
    asked = next(attribute for attribute, forms in target.facts.items() if forms == item.answers)
    draw = random.Random(f"near people {item.id}")
    names = draw.sample([given for given in GIVEN if given != target.given], count)
    taken, made = {item.answers[0]}, []
    for n, given in enumerate(names):
        another = draw.choice([attribute for attribute in ATTRIBUTES if attribute != asked])
        value = _fresh(lambda: _value(asked, draw), taken)
        besides = _fresh(lambda a=another: _value(a, draw), {target.facts[another][0]})  # type: ignore[misc]
        changes = {target.name: f"{given} {target.family}", item.answers[0]: value, target.facts[another][0]: besides}
        made.append(Document(rewritten(target.document.text, changes), id=f"{target.document.id}-near-{n}"))
    return tuple(made)


def near_functions(task: ApiDocsTask, item: Item, count: int) -> tuple[Document, ...]:
    """Of the invented function that `item` asks about: the function of that name in other modules.

    Parameters are called alike; every default, class, exception and version is another.

    Raises:
        InputError: more than there are.
    """
    check_count("distractors", count, 1, MOST_FUNCTIONS)
    module, name = item.documents[item.gold[0]].id.split(".")
    target = next(e for split in task.splits for e in task.entries(split) if (e.module, e.name) == (module, name))
    draw = random.Random(f"near functions {item.id}")
    taken: dict[int, set[str]] = {n: {_stated(fact)} for n, fact in enumerate(target.facts)}
    made = []
    for other in draw.sample([each for each in MODULES if each != module], count):
        changes = {f"{module}.{name}": f"{other}.{name}"}
        for n, fact in enumerate(target.facts):
            changes[_stated(fact)] = _fresh(lambda f=fact: _literal(f, draw), taken[n])  # type: ignore[misc]
        made.append(Document(rewritten(target.text, changes), id=f"{other}.{name}"))
    return tuple(made)


def rewritten(text: str, changes: Mapping[str, str]) -> str:
    """Every whole occurrence of a key by its value, all at once: what was put in is not looked at again."""
    names = "|".join(re.escape(old) for old in sorted(changes, key=len, reverse=True))
    return re.sub(rf"(?<!\w)(?<!\d\.)(?:{names})(?!\w|\.\w)", lambda found: changes[found[0]], text)


def _person(task: BiographyTask, item: Item) -> Person:
    return task.person(int(item.documents[item.gold[0]].id.rpartition("-")[2]))


def _value(attribute: str, draw: random.Random) -> str:
    if attribute in POOLS:
        return draw.choice(POOLS[attribute])
    return date(draw.randint(10, 28), draw.randint(1, 12), draw.randint(1940, 2004))[0]


def _stated(fact: Fact) -> str:
    """The fact's value as it stands in the text; a question for a function names the class that it returns."""
    return fact.about if fact.kind == "function" else fact.answers[0]


def _literal(fact: Fact, draw: random.Random) -> str:
    """Another value of the same sort."""
    if fact.kind in ("exception", "function"):
        return draw.choice(TRAITS) + draw.choice(THINGS) + ("Error" if fact.kind == "exception" else "")
    if fact.kind == "version":
        return f"{draw.randint(1, 7)}.{draw.randint(1, 19)}"
    value = ast.literal_eval(fact.answers[0])
    if isinstance(value, str):
        return repr(draw.choice(SHADES))
    return repr(draw.randint(11, 998)) if isinstance(value, int) else repr(draw.randint(101, 989) / 1000)


def _fresh(make: Callable[[], str], taken: set[str]) -> str:
    """The first that is not taken, which it is from then on."""
    while (made := make()) in taken:
        pass
    taken.add(made)
    return made
