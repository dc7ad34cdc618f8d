"""What a writer is trained on: sets of documents with questions, and others that are held out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.training.asking import Asker
from kvquilt.training.exercise import Exercise

Report = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class Data:
    """Exercises to train on, and held-out ones about other documents."""

    exercises: tuple[Exercise, ...]
    held_out: tuple[Exercise, ...]


@dataclass(frozen=True, slots=True)
class Sets:
    """How exercises are drawn.

    Attributes:
        documents: in one prompt; several numbers take turns.
        questions: about one set.
        count: of sets to train on; None for a default that uses every document or line.
        held_out: share of the sources that is not trained on; 0 for no validation.
        validation: sets to validate on.
    """

    documents: tuple[int, ...] = (4,)
    questions: int = 4
    count: int | None = None
    held_out: float = 0.1
    validation: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.documents or min(self.documents) < 1:
            raise InputError("documents", "at least 1 in a set", self.documents)
        for name, value in (("questions", self.questions), ("validation", self.validation), ("sets", self.count)):
            if value is not None and value < 1:
                raise InputError(name, "at least 1", value)
        if not 0 <= self.held_out < 1:
            raise InputError("held_out", "a share from 0 to below 1", self.held_out)


def divided(sources: Sequence[Sequence[Document]], sets: Sets) -> tuple[list[Document], list[Document]]:
    """Passages to train on and held-out ones: no source, such as a file, has passages in both.

    Raises:
        InputError: a single source, of which nothing can be held out, or too few passages for one set.
    """
    sources = [each for each in sources if each]
    if sets.held_out and len(sources) < 2:
        rule = "at least two files are needed, one to train on and one to validate on; or hold out nothing (0)"
        raise InputError("data", rule, len(sources))
    room = sets.held_out * sum(map(len, sources))
    held: list[Sequence[Document]] = []
    for each in random.Random(f"{sets.seed} divide").sample(sources, len(sources)):
        if len(each) <= room - sum(map(len, held)):
            held.append(each)
    if sets.held_out and not held:
        held = [min(sources, key=len)]
    train = [d for each in sources if not any(each is other for other in held) for d in each]
    largest = max(sets.documents)
    if len(train) < largest:
        rule = f"a set of {largest} needs as many passages to train on; add documents, or make sets or passages smaller"
        raise InputError("data", rule, f"{len(train)} passages")
    return train, [d for each in held for d in each]


def drawn(
    pool: Sequence[Document], fillers: Sequence[Document], count: int, sets: Sets, what: str
) -> list[list[Document]]:
    """Sets of documents: each of `pool` comes once before any comes twice; where it is small, `fillers` join."""
    draw = random.Random(f"{sets.seed} sets {what}")
    waiting: list[Document] = []
    made = []
    for n in range(count):
        chosen: list[Document] = []
        size = min(sets.documents[n % len(sets.documents)], len(pool) + len(fillers))
        while len(chosen) < min(size, len(pool)):
            if not waiting:
                waiting = draw.sample(pool, len(pool))
            at = next((k for k, each in enumerate(waiting) if each not in chosen), None)
            if at is None:  # all that wait are in it already: the next round begins
                waiting += draw.sample(pool, len(pool))
                continue
            chosen.append(waiting.pop(at))
        others = [each for each in fillers if each not in chosen]
        chosen += draw.sample(others, size - len(chosen))
        draw.shuffle(chosen)
        made.append(chosen)
    return made


def asked_data(
    train: Sequence[Document],
    held: Sequence[Document],
    sets: Sets,
    asker: Asker,
    check: Callable[[Exercise], object],
    progress: Report | None = None,
) -> Data:
    """Sets of plain documents, with questions by the model itself.

    Args:
        train, held: passages; a set to validate on asks about held-out ones only, and others join it if need be.
        check: raises for an exercise that does not fit, before a question is made.

    Raises:
        InputError: too few documents, or one that does not fit.
    """
    plan = [("train", drawn(train, (), sets.count or len(train), sets, "train"))]
    if held:
        plan.append(("validation", drawn(held, train, sets.validation, sets, "validation")))
    for _, chosen in plan:
        for each in chosen:
            check(Exercise(tuple(each), ("?" * 64,)))  # about as long as a question
    used = list({d.text: d for _, chosen in plan for each in chosen for d in each}.values())
    known = {d.text: found for d, found in zip(used, asker.questions(used, progress), strict=True)}
    about = {d.text for d in held}
    made: dict[str, list[Exercise]] = {"train": [], "validation": []}
    for what, chosen in plan:
        draw = random.Random(f"{sets.seed} questions {what}")
        for each in chosen:
            targets = [d for d in each if what == "train" or d.text in about]
            asked = _spread([known[d.text] for d in targets], sets.questions, draw)
            made[what].append(Exercise(tuple(each), tuple(asked)))
    return Data(tuple(made["train"]), tuple(made["validation"]))


def _spread(found: Sequence[Sequence[str]], count: int, draw: random.Random) -> list[str]:
    """`count` different questions, or all there are, spread over the documents in a drawn order."""
    rounds = [draw.sample(each, len(each)) for each in draw.sample(found, len(found))]
    turns = [each[n] for n in range(max(map(len, rounds))) for each in rounds if n < len(each)]
    return list(dict.fromkeys(turns))[:count]


def split_exercises(exercises: Sequence[Exercise], sets: Sets) -> Data:
    """Exercises as they were given: those that share a document, directly or through others, stay together.

    Raises:
        InputError: all of them do.
    """
    if not sets.held_out:
        return Data(tuple(exercises[: sets.count]), ())
    groups = _connected(exercises)
    wanted = max(1, min(sets.validation, math.ceil(sets.held_out * len(exercises))))
    held: list[int] = []
    for group in random.Random(f"{sets.seed} divide").sample(groups, len(groups)):
        if len(group) <= wanted - len(held):
            held += group
    if not held or len(held) == len(exercises):
        rule = (
            "lines share documents all over, so none can be held out; name held-out ones with --validation, or hold "
            "out nothing (0)"
        )
        raise InputError("data", rule, f"{len(exercises)} lines")
    left = [each for n, each in enumerate(exercises) if n not in held]
    return Data(tuple(left[: sets.count]), tuple(exercises[n] for n in sorted(held)))


def _connected(exercises: Sequence[Exercise]) -> list[list[int]]:
    """Indices of exercises by what they share, in their order."""
    owner: dict[str, int] = {}
    parent = list(range(len(exercises)))

    def root(n: int) -> int:
        while parent[n] != n:
            parent[n] = parent[parent[n]]
            n = parent[n]
        return n

    for n, each in enumerate(exercises):
        for document in each.documents:
            first = owner.setdefault(document.text, n)
            parent[max(root(n), root(first))] = min(root(n), root(first))
    groups: dict[int, list[int]] = {}
    for n in range(len(exercises)):
        groups.setdefault(root(n), []).append(n)
    return list(groups.values())
