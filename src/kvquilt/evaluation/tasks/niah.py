"""Needles in a haystack, after RULER (Hsieh et al., 2024): pass codes in prose that has nothing to do with them.

The haystack is Python's own help topics, cut at sentence ends. It differs between Python's versions, so
numbers compare within one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.checks import check_count, check_name, check_share
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.help_topics import HelpTopics
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.needle_words import ALL, LINK, NAMES, NEEDLE, ONE, SEVERAL
from kvquilt.evaluation.tasks.splits import SIZES, SPLITS, check_asked

KINDS = ("single", "multikey", "multivalue", "multiquery", "chain")
_DRAWN = -1


def rough_tokens(text: str) -> int:
    """A quarter of the characters, rounded up: tokens where no tokenizer is at hand."""
    return -(-len(text) // 4)


@lru_cache(maxsize=2)
def topics(split: str) -> tuple[str, ...]:
    """Sentences of `HelpTopics`: those that it tests with evaluate, all others tune."""
    names = ("test",) if split == "evaluation" else ("train", "tuning")
    return tuple(sentence for name in names for sentence in HelpTopics().sentences(name))


@dataclass(frozen=True, slots=True)
class Needle:
    """A sentence to hide, and whether the answer rests on it."""

    text: str
    wanted: bool


@dataclass(frozen=True, slots=True)
class NeedleTask:
    """Pass codes of invented names. Group is the first name asked about; names and haystacks of splits are apart.

    The answer is all wanted codes, joined by a comma and a blank.

    Attributes:
        kind: ``single``, one needle. ``multikey``: others of other names. ``multivalue``: one name has several codes,
            all are asked for. ``multiquery``: several names are asked about. ``chain``: among codes of other names, one
            document says whose code is the same, another one states it, so that one must be seen with the other.
        needles: of ``multikey`` and ``chain``, how many codes there are; how many are asked for of the next two.
        documents: how many an item has.
        tokens: what a document may measure at most; it is cut at a sentence end below.
        depth: where in its document a wanted needle stands, 0 to 1; -1 draws.
        position: index of the document with the first wanted code; -1 draws.
        order: of ``chain``: the code stands before (``forward``) or behind (``backward``) what points to it.
        random_seed: other seeds give other items.
        length: measures a text.
        haystack: a split's sentences.

    Raises:
        InputError: a setting out of its range.
    """

    kind: Literal["single", "multikey", "multivalue", "multiquery", "chain"] = "single"
    needles: int = 4
    documents: int = 8
    tokens: int = 256
    depth: float = _DRAWN
    position: int = _DRAWN
    order: Literal["drawn", "forward", "backward"] = "drawn"
    random_seed: int = 0
    length: Callable[[str], int] = rough_tokens
    haystack: Callable[[str], tuple[str, ...]] = field(default=topics, repr=False)

    name: ClassVar[str] = "niah"
    system: ClassVar[str] = (
        "Answer the question from the documents with the bare pass code, or with all of them, separated by commas."
    )
    metric: ClassVar[Metric] = Metric("recall")
    answer_limit: ClassVar[int] = 128
    splits: ClassVar[tuple[str, ...]] = SPLITS
    extractive: ClassVar[bool] = True
    skipped: ClassVar[Mapping[str, int]] = {}

    def __post_init__(self) -> None:
        check_name("kind", self.kind, KINDS)
        check_name("order", self.order, ("drawn", "forward", "backward"))
        check_count("needles", self.needles, 2, 64)
        check_count("documents", self.documents, 2 if self.kind == "chain" else 1)
        check_count("tokens", self.tokens, 1)
        check_count("position", self.position, _DRAWN, self.documents - 1)
        if self.depth != _DRAWN:
            check_share("depth", self.depth)
        edge = {"forward": self.documents - 1, "backward": 0}.get(self.order)
        if self.kind == "chain" and self.position == edge:
            raise InputError("position", f"leaves no place for what points to it, {self.order}", self.position)

    def items(self, split: str, count: int | None = None, *, seed: int = 0) -> list[Item]:
        """As every task's.

        Raises:
            InputError: also documents too short for a sentence beside their needles, or more of them than the split's
                haystack fills.
        """
        check_name("split", split, SPLITS)
        check_asked(count)
        hay = tuple(sentence for sentence in self.haystack(split) if not _has_code(sentence))
        names = _names(self.random_seed, split)
        shuffled = random.Random(f"niah names {self.random_seed} {split} {seed}").sample(names, len(names))
        cut = Cut(hay, self.tokens, self.length)
        return [self._item(split, n, seed, shuffled, cut) for n in range(SIZES[split] if count is None else count)]

    def _item(self, split: str, n: int, seed: int, names: list[str], cut: Cut) -> Item:
        draw = random.Random(f"niah {self.kind} {self.random_seed} {split} {seed} {n}")
        target = names[n % len(names)]
        others = draw.sample([name for name in names if name != target], self.needles)
        question, answer, needles = self._needles([target, *others], split, draw)
        places = self._places(len(needles), draw)
        hidden: list[list[tuple[float, str]]] = [[] for _ in range(self.documents)]
        for needle, place in zip(needles, places, strict=True):
            depth = self.depth if needle.wanted and self.depth != _DRAWN else draw.random()
            hidden[place].append((depth, needle.text))
        texts = cut.documents(hidden, draw)
        name = f"niah-{self.kind}-{split}-{seed}-{n}"
        made = tuple(Document(text, id=f"{name}-{k}") for k, text in enumerate(texts))
        gold = tuple(sorted({p for needle, p in zip(needles, places, strict=True) if needle.wanted}))
        return Item(name, made, question, (answer,), gold, target, self.name, self.kind)

    def _needles(self, names: list[str], split: str, draw: random.Random) -> tuple[str, str, list[Needle]]:
        """Question, answer and needles: the first wanted code first; of a chain, what points to it second."""
        codes = [str(code) for code in draw.sample(range(10_000, 100_000), self.needles)]
        wordings = {"multivalue": ALL, "multiquery": SEVERAL}.get(self.kind, ONE)
        wording = draw.choice(wordings if split == "evaluation" else wordings[:-1])
        asked, owners = names[:1], names[: self.needles]
        wanted = 1
        if self.kind == "single":
            owners = names[:1]
        elif self.kind == "multivalue":
            owners, wanted = names[:1] * self.needles, self.needles
        elif self.kind == "multiquery":
            asked, wanted = owners, self.needles
        elif self.kind == "chain":  # the code is another one's, whom the first only points to
            owners = names[1:]
        needles = [
            Needle(NEEDLE.format(name=owner, code=code), n < wanted)
            for n, (owner, code) in enumerate(zip(owners, codes, strict=False))
        ]
        if self.kind == "chain":
            needles.insert(1, Needle(LINK.format(name=names[0], other=owners[0]), True))
        listed = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
        return wording.format(names=listed), ", ".join(codes[:wanted]), needles

    def _places(self, count: int, draw: random.Random) -> list[int]:
        """The document of every needle: all have some before one has two, and those of a chain are in their order."""
        free = draw.sample(range(self.documents), self.documents)
        if self.position != _DRAWN:
            free.remove(self.position)
            free.insert(0, self.position)
        if self.kind == "chain" and self.order != "drawn":
            first, second = self._pair(draw)
            free = [first, second, *(place for place in free if place not in (first, second))]
        return [free[n % len(free)] for n in range(count)]

    def _pair(self, draw: random.Random) -> tuple[int, int]:
        """Places of a code and of what points to it."""
        forward = self.order == "forward"
        if self.position == _DRAWN:
            first, second = sorted(draw.sample(range(self.documents), 2), reverse=not forward)
            return first, second
        beside = range(self.position + 1, self.documents) if forward else range(self.position)
        return self.position, draw.choice(beside)


@dataclass(frozen=True, slots=True)
class Cut:
    """Documents out of a haystack: sentence behind sentence, from a drawn one on, back at the first behind the last."""

    sentences: tuple[str, ...] = field(repr=False)
    tokens: int
    length: Callable[[str], int]

    def documents(self, hidden: list[list[tuple[float, str]]], draw: random.Random) -> list[str]:
        """A text for each list of needles, given with their depths. No sentence stands in two.

        Raises:
            InputError: too short a document, too few sentences.
        """
        start = used = draw.randrange(len(self.sentences))
        texts = []
        for needles in hidden:
            count = self._most(used, needles)
            texts.append(self._text(used, count, needles))
            used += count
        if used - start > len(self.sentences):
            raise InputError("documents", "more, or longer ones, than the haystack fills", len(hidden))
        return texts

    def _most(self, start: int, needles: list[tuple[float, str]]) -> int:
        """The number of sentences that fill a document beside its needles."""

        def fits(count: int) -> bool:
            return self.length(self._text(start, count, needles)) <= self.tokens

        if not fits(1):
            raise InputError("tokens", "too few for a sentence beside what is hidden", self.tokens)
        low, high = 1, 2
        while high <= len(self.sentences) and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _text(self, start: int, count: int, needles: list[tuple[float, str]]) -> str:
        parts = [self.sentences[n % len(self.sentences)] for n in range(start, start + count)]
        for depth, text in sorted(needles, reverse=True):  # the deepest first, so that the others keep their places
            parts.insert(round(depth * count), text)
        return " ".join(parts)


def _has_code(sentence: str) -> bool:
    """Whether some of its words look like a pass code."""
    return any(word.isdigit() and len(word) >= 5 for word in sentence.replace(".", " ").split())


def _names(random_seed: int, split: str) -> list[str]:
    """A half each."""
    names = random.Random(f"niah halves {random_seed}").sample(NAMES, len(NAMES))
    half = len(names) // 2
    return names[:half] if split == "tuning" else names[half:]
