"""A user's own questions: a JSONL file, ``{"documents": [...], "question": ..., "answers": [...]}`` a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.checks import check_count
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.leakage import check_apart, digests, normalised
from kvquilt.evaluation.tasks.lines import given_documents, given_text, given_texts, read_lines, unread_fields
from kvquilt.evaluation.tasks.splits import SPLITS, Divided, check_asked, in_turns

_FORM = 'must be an object: {"documents": [...], "question": ..., "answers": [...]}'
_FIELDS = ("documents", "question", "answers", "id", "gold", "group", "kind")
_OF_A_DOCUMENT = ("text", "id")


@dataclass(frozen=True, slots=True)
class JsonlTask:
    """One item a line: the first half of the groups tunes, the other evaluates. Groups take turns.

    ``documents``: texts, or objects with ``text`` and, if wanted, ``id``. ``answers``: all accepted. A line may
    also have ``id``, ``gold`` (indices of the documents that the answer rests on), ``group`` and ``kind`` (see `Item`);
    line and document may have ``meta``, an object that nobody looks at. Other fields are counted in `skipped`.

    Lines that share a group, a document or a question are one group, so that what tunes is apart from what evaluates.
    Where all lines are one group, all of it evaluates, and tuning needs a file of its own.

    Attributes:
        path: the file.
        tuning: the file that tunes; without one, the first `share` of `path`'s groups do.
        system: the message that the questions are asked under.
        grader: see `Metric`, as `form` and `right`.

    Raises:
        InputError: names line and field; a setting out of its range.
        LeakageError: the two files share something.
    """

    path: str | Path
    tuning: str | Path = ""
    share: float = 0.5
    system: str = "Answer the question from the documents. Give the answer only, in as few words as possible."
    grader: str = "contains_em"
    form: str = "whole"
    right: float = 1.0
    answer_limit: int = 32
    groups: Divided[tuple[Item, ...]] = field(init=False, repr=False, compare=False)
    metric: Metric = field(init=False, repr=False, compare=False)
    skipped: Mapping[str, int] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "jsonl"
    splits: ClassVar[tuple[str, ...]] = SPLITS
    extractive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("answer_limit", self.answer_limit, 1)
        object.__setattr__(self, "metric", Metric(self.grader, self.form, self.right))
        unread: Counter[str] = Counter()
        object.__setattr__(self, "skipped", unread)
        read = _grouped(_items(self.path, unread))
        tuning = _grouped(_items(self.tuning, unread)) if self.tuning else None
        object.__setattr__(self, "groups", Divided.of(read, self.share, tuning))
        if tuning is not None:
            check_apart(self.items("tuning"), self.items("evaluation"))

    def items(self, split: str, count: int | None = None, *, seed: int = 0) -> list[Item]:
        """As every task's; nothing is drawn, so `seed` changes nothing."""
        check_asked(count)
        return in_turns(self.groups.split(split))[:count]


def _items(path: str | Path, unread: Counter[str]) -> list[Item]:
    read = read_lines("path", Path(path), _FORM)
    for where, data in read:
        unread.update(_unread(data, where))
    made = [_item(data, where) for where, data in read]
    first: dict[str, int] = {}
    for n, item in enumerate(made):
        if first.setdefault(item.id, n) != n:
            raise InputError("path", "ids must tell lines apart: an id comes up twice", item.id)
    return made


def _unread(data: dict[str, Any], where: str) -> Iterator[str]:
    yield from (f"field {name!r}" for name in unread_fields(data, _FIELDS, where))
    documents = data.get("documents")
    for n, document in enumerate(documents if isinstance(documents, list) else ()):
        if isinstance(document, dict):
            found = unread_fields(document, _OF_A_DOCUMENT, f"{where}: documents[{n}]")
            yield from (f"field {name!r} of documents" for name in found)


def _item(data: dict[str, Any], where: str) -> Item:
    name = given_text(data, "id", where, where.replace(" ", "-"))
    gold = data.get("gold", [])
    if not isinstance(gold, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in gold):
        raise InputError(f"{where}: gold", "must be a list of indices of documents", type(gold).__name__)
    group, kind = given_text(data, "group", where, name), given_text(data, "kind", where) if "kind" in data else ""
    documents, question = given_documents(data, where), given_text(data, "question", where)
    answers = given_texts(data, "answers", where)
    try:
        return Item(name, documents, question, answers, tuple(gold), group, "jsonl", kind)
    except InputError as error:
        raise InputError(f"{where}: {error.field}", error.rule, error.got) from None


def _grouped(items: list[Item]) -> list[tuple[Item, ...]]:
    """Items that share something, directly or through others, in the order of their first, which names the group."""
    above = list(range(len(items)))

    def root(n: int) -> int:
        while above[n] != n:
            above[n] = n = above[above[n]]
        return n

    first: dict[tuple[str, str], int] = {}
    for n, item in enumerate(items):
        marks = [("group", item.group), ("question", normalised(item.question))]
        marks += [("document", digest) for document in item.documents for digest in digests(document.text)]
        for mark in marks:
            one, other = sorted((root(first.setdefault(mark, n)), root(n)))
            above[other] = one
    groups: dict[int, list[Item]] = {}
    for n, item in enumerate(items):
        groups.setdefault(root(n), []).append(replace(item, group=items[root(n)].group))
    return list(map(tuple, groups.values()))
