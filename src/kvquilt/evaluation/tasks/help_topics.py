"""Documents of another kind than people and encyclopedias: passages of Python's own help topics.

They come with every Python, differ between its versions, and have no questions: a model asks them itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from kvquilt.document import Document
from kvquilt.evaluation.tasks.checks import check_name
from kvquilt.passages import SourceFile, split

_SHARES = {"test": 0.3, "tuning": 0.1}  # of the characters, at most; what is left trains
_LIMIT = 460  # characters, 80 to 120 tokens of most tokenizers
_LEAST = 320
_LEAST_SENTENCE = 20
_LETTERS = 0.8  # of the characters, blanks included: grammars and tables have fewer, and there is little to ask of them
_SHARED = 60  # characters of a paragraph that two topics have in common by more than chance


@dataclass(frozen=True, slots=True)
class HelpTopics:
    """Passages of 320 to 460 characters, topic by topic, each text once.

    Topics that share a paragraph, as the chapter on compound statements does with those on `if` and `with`, are one
    family, and a family stands in one split: train, tuning or test.

    Attributes:
        random_seed: which families stand where.
    """

    random_seed: int = 0

    def documents(self, split: str) -> list[Document]:
        """A split's passages; the id is ``python-help-<topic>#<k>``.

        Raises:
            InputError: an unknown split.
        """
        first: dict[str, Document] = {}
        for name in self._names(split):
            for document in _passages(name):
                first.setdefault(document.text, document)
        return list(first.values())

    def sentences(self, split: str) -> tuple[str, ...]:
        """The sentences of a split's prose, topic by topic, each once: a haystack.

        Raises:
            InputError: an unknown split.
        """
        prose = [" ".join(p.split()) for name in self._names(split) for p in re.split(r"\n\s*\n", _topics()[name])]
        found = [sentence for paragraph in prose for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)]
        return tuple(dict.fromkeys(filter(_is_sentence, found)))

    def _names(self, split: str) -> list[str]:
        valid = ("train", *_SHARES)
        check_name("split", split, valid)
        return sorted(name for family in _split(self.random_seed)[split] for name in family)


def _passages(name: str) -> Iterator[Document]:
    for document in split(SourceFile(f"python-help-{name}", _topics()[name], ".rst"), limit=_LIMIT):
        text = document.text
        letters = sum(character.isalpha() or character.isspace() for character in text)
        if len(text) >= _LEAST and letters >= _LETTERS * len(text):
            yield document


def _is_sentence(text: str) -> bool:
    """Words, from a capital to a full stop."""
    letters = sum(character.isalpha() or character.isspace() for character in text)
    whole = text[:1].isupper() and text.endswith((".", "!", "?"))
    return whole and _LEAST_SENTENCE <= len(text) <= _LEAST and letters >= _LETTERS * len(text)


@lru_cache(maxsize=8)
def _split(random_seed: int) -> dict[str, list[tuple[str, ...]]]:
    """Families by split: in a drawn order, each goes to the first that has room for all of it."""
    families = list(_families())
    random.Random(f"help topics {random_seed}").shuffle(families)
    sizes = {family: sum(len(_topics()[name]) for name in family) for family in families}
    room = {name: share * sum(sizes.values()) for name, share in _SHARES.items()}
    made: dict[str, list[tuple[str, ...]]] = {"train": [], **{name: [] for name in room}}
    for family in families:
        place = next((name for name, left in room.items() if sizes[family] <= left), "train")
        if place != "train":
            room[place] -= sizes[family]
        made[place].append(family)
    return made


@lru_cache(maxsize=1)
def _families() -> tuple[tuple[str, ...], ...]:
    """Topics that share a long paragraph, directly or through others; ordered by name."""
    family = {name: {name} for name in _topics()}
    owner: dict[str, str] = {}
    for name, text in sorted(_topics().items()):
        for paragraph in re.split(r"\n\s*\n", text):
            plain = " ".join(paragraph.split())
            other = owner.setdefault(plain, name) if len(plain) >= _SHARED else name
            if family[other] is not family[name]:
                family[other] |= family[name]
                for member in family[name]:
                    family[member] = family[other]
    return tuple(sorted({tuple(sorted(members)) for members in family.values()}))


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return dict(topics)
