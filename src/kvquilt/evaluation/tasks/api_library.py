"""Entries of a library's documentation, and the facts in them that can be asked for to the letter."""

from __future__ import annotations

from dataclasses import dataclass, field

# {f} is a function with its module, {m} the module, {n} the bare name, {x} what the fact is about.
# The last of each is asked in evaluation only.
QUESTIONS = {
    "default": (
        "What is the default value of the parameter {x} of {f}?",
        "Which value does the parameter {x} of {f} have by default?",
        "In a call of {f}, what is {x} if nobody gives it?",
    ),
    "exception": (
        "Which exception does the documentation of {f} name?",
        "Which exception does {f} raise, by its documentation?",
        "Which exception must a caller of {f} expect?",
    ),
    "returned": (
        "Of which class is the object that {f} returns?",
        "What is the class of what {f} returns?",
        "An instance of which class does {f} give back?",
    ),
    "parameter": (
        "What is the name of the {x} parameter of {f}?",
        "Which parameter of {f} is the {x} one?",
        "In the signature of {f}, which parameter is {x}?",
    ),
    "function": (
        "Which function of {m} returns a {x}?",
        "With which function of {m} does one get a {x}?",
        "Which function of the module {m} gives back a {x}?",
    ),
    "version": (
        "Since which version does {m} have the function {n}?",
        "In which version was {f} added?",
        "Which version is the first with {f}?",
    ),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """`kind`: of `QUESTIONS`; `about`: what stands for ``{x}``; `answers`: the first stands in the entry's text."""

    kind: str
    about: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One function's documentation."""

    module: str
    name: str
    text: str = field(repr=False)
    facts: tuple[Fact, ...] = field(repr=False)

    def question(self, fact: Fact, wording: str) -> str:
        return wording.format(f=f"{self.module}.{self.name}", m=self.module, n=self.name, x=fact.about)


def literals(value: object) -> tuple[str, ...]:
    """How a value may be written: as Python writes it first; a text with either quotes, and without any."""
    if not isinstance(value, str):
        return (repr(value),)
    forms = (repr(value), f"'{value}'", f'"{value}"', value)
    return tuple(dict.fromkeys(form for form in forms if form.strip()))
