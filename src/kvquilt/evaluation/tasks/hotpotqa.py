"""HotpotQA: questions that need two paragraphs, read from a file of the original form or the hub's (Yang et al., 2018).

The data are CC BY-SA 4.0 and no part of this project; the caller names a file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.checks import check_count
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.rows import check_rows, one_row, read_rows, text_of
from kvquilt.training.exercise import Exercise

_FORM = "must be a list of HotpotQA samples (_id, question, answer, supporting_facts, context)"


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A titled paragraph of a sample.

    Attributes:
        sentences: all but the first begin with a blank, as in the file: joined with nothing they are the paragraph.
        supporting: indices of the sentences that the answer rests on; the paragraph is gold where there are any.
    """

    title: str
    sentences: tuple[str, ...] = field(repr=False)
    supporting: frozenset[int]

    @property
    def text(self) -> str:
        return "".join(self.sentences).strip()

    def cut(self, limit: int | None, length: Callable[[str], int]) -> Paragraph:
        """Without its last sentences, until it measures `limit` at most; supporting ones and the first always stay."""
        kept = list(range(len(self.sentences)))
        spare = [i for i in reversed(kept[1:]) if i not in self.supporting]
        while limit is not None and spare and length("".join(self.sentences[i] for i in kept)) > limit:
            kept.remove(spare.pop(0))
        supporting = frozenset(kept.index(i) for i in self.supporting)
        return Paragraph(self.title, tuple(self.sentences[i] for i in kept), supporting)


@dataclass(frozen=True, slots=True)
class Sample:
    """`kind`: ``bridge`` or ``comparison``, where the file says it."""

    id: str
    question: str = field(repr=False)
    answer: str = field(repr=False)
    paragraphs: tuple[Paragraph, ...]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class HotpotQA:
    """The samples of a file, in its order.

    Attributes:
        with_title: a document is title, newline, paragraph: what joins the two paragraphs is often named in a title
            only. ``False`` is the form that the trained writers' papers use.
    """

    samples: tuple[Sample, ...]
    with_title: bool = True

    SYSTEM: ClassVar[str] = (
        "Answer the question from the documents. Give the answer only, in as few words as possible: no sentence."
    )

    @classmethod
    def read(cls, path: str | Path, *, sha256: str | None = None, with_title: bool = True) -> HotpotQA:
        """Read a file, or a data set (see `read_rows`), in the distractor setting: a sample has its gold paragraphs.

        Args:
            sha256: what the file's digest must be.

        Raises:
            InputError: the file cannot be read, has another digest or another form.
        """
        rows = check_rows(read_rows(path, _FORM, sha256 or ""), _FORM)
        return cls(tuple(_sample(index, row) for index, row in enumerate(rows)), with_title)

    def apart_from(self, other: HotpotQA) -> HotpotQA:
        """Without the samples that share a paragraph with `other`: what may be trained on when `other` evaluates."""
        known = {paragraph.text for sample in other.samples for paragraph in sample.paragraphs}
        kept = tuple(s for s in self.samples if not known & {paragraph.text for paragraph in s.paragraphs})
        return replace(self, samples=kept)

    def items(
        self,
        count: int | None = None,
        documents: int | None = None,
        seed: int = 0,
        *,
        limit: int | None = None,
        length: Callable[[str], int] = len,
    ) -> list[Item]:
        """The first `count` samples, or all. Group is the question, kind the sample's own.

        Args:
            documents: how many a prompt has: the gold ones and others of the sample, drawn and shuffled by `seed` and
                the sample's id; all where a sample has fewer. ``None``: all, in the file's order.
            limit: the most that a paragraph may measure. Sentences are left out from its end, but never a supporting
                one nor the first, so a few stay longer.
            length: measures a text; characters by default.

        Raises:
            InputError: a count or limit below 1, fewer documents than a sample has gold ones.
        """
        for name, value in (("count", count), ("documents", documents), ("limit", limit)):
            if value is not None:
                check_count(name, value, 1)
        return [self._item(sample, documents, seed, limit, length) for sample in self.samples[:count]]

    def exercises(
        self,
        count: int | None = None,
        documents: int | None = None,
        seed: int = 0,
        *,
        limit: int | None = None,
        length: Callable[[str], int] = len,
    ) -> list[Exercise]:
        """`items` without answers: one question about each set."""
        made = self.items(count, documents, seed, limit=limit, length=length)
        return [Exercise(item.documents, (item.question,)) for item in made]

    def _item(
        self, sample: Sample, documents: int | None, seed: int, limit: int | None, length: Callable[[str], int]
    ) -> Item:
        # without its title a paragraph may be empty; a gold one is not, since its supporting sentences are there
        chosen = [p for p in sample.paragraphs if self.with_title or p.text]
        if documents is not None:
            draw = random.Random(f"hotpotqa {seed} {sample.id}")
            gold = [paragraph for paragraph in chosen if paragraph.supporting]
            others = [paragraph for paragraph in chosen if not paragraph.supporting]
            if documents < len(gold):
                raise InputError("documents", f"must be at least the {len(gold)} gold ones of a sample", documents)
            chosen = gold + draw.sample(others, min(len(others), documents - len(gold)))
            draw.shuffle(chosen)
        chosen = [paragraph.cut(limit, length) for paragraph in chosen]
        texts = [f"{p.title}\n{p.text}" if self.with_title else p.text for p in chosen]
        made = tuple(Document(text, id=f"hotpotqa-{sample.id}-{n}") for n, text in enumerate(texts))
        places = tuple(n for n, paragraph in enumerate(chosen) if paragraph.supporting)
        return Item(sample.id, made, sample.question, (sample.answer,), places, sample.id, "hotpotqa", sample.kind)


def _sample(index: int, row: Any) -> Sample:
    with one_row(f"path[{index}]", _FORM):
        supporting: dict[str, set[int]] = {}
        for title, sentence in _pairs(row["supporting_facts"], "title", "sent_id"):
            supporting.setdefault(title, set()).add(int(sentence))
        paragraphs = tuple(
            Paragraph(title, tuple(text_of(s, "context") for s in sentences), frozenset(supporting.pop(title, ())))
            for title, sentences in _pairs(row["context"], "title", "sentences")
        )
        question, answer = text_of(row["question"], "question").strip(), text_of(row["answer"], "answer").strip()
        name, kind = text_of(row["_id" if "_id" in row else "id"], "id"), text_of(row.get("type", ""), "type")
        sample = Sample(name, question, answer, paragraphs, kind)
    if supporting:
        raise InputError(f"path[{index}]", "every supporting title must be among the paragraphs", sample.id)
    if not all(0 <= n < len(p.sentences) for p in paragraphs for n in p.supporting):
        raise InputError(f"path[{index}]", "every supporting sentence must be in its paragraph", sample.id)
    return sample


def _pairs(given: Any, first: str, second: str) -> Iterable[tuple[Any, Any]]:
    """Pairs as the file has them, or as the hub does: two lists by name."""
    return zip(given[first], given[second], strict=True) if isinstance(given, dict) else given
