"""MuSiQue: questions that need two to four paragraphs of twenty, from a file of its form (Trivedi et al., 2022).

The data are CC BY 4.0 and no part of this project; the caller names a file.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.checks import check_count
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.leakage import normalised
from kvquilt.evaluation.tasks.rows import check_rows, one_row, read_rows, text_of
from kvquilt.evaluation.tasks.splits import SPLITS, Divided, check_asked

_FORM = "must be a list of MuSiQue samples (id, question, answer, paragraphs)"


@dataclass(frozen=True, slots=True)
class Paragraph:
    title: str
    text: str = field(repr=False)
    supporting: bool

    @property
    def known_as(self) -> str:
        return normalised(self.text)


@dataclass(frozen=True, slots=True)
class Sample:
    """`answers`: the answer and its aliases."""

    id: str
    question: str = field(repr=False)
    answers: tuple[str, ...] = field(repr=False)
    paragraphs: tuple[Paragraph, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class MusiqueTask:
    """Samples of a file: the first half tunes, the second evaluates. Group is the question, kind how
    many paragraphs support it.

    Halves share paragraphs that no answer rests on. Tuning goes without them, and without samples whose supporting ones
    evaluate. Titles are no names: they come up again within a sample.

    Attributes:
        path: the file, or a data set (see `read_rows`).
        tuning: the file that tunes; without one, the first `share` of `path`'s samples do.
        documents: how many an item has: the gold ones and others of the sample, drawn and shuffled; 0 is all, in the
            file's order.
        with_title: whether a document begins with its title.
        sha256: what the digest of `path` must be.
        samples: what was read.
        skipped: samples and paragraphs left out, by the reason.

    Raises:
        InputError: a file that cannot be read or has another form, a setting out of its range.
    """

    path: str | Path
    tuning: str | Path = ""
    share: float = 0.5
    documents: int = 0
    with_title: bool = True
    sha256: str = ""
    samples: Divided[Sample] = field(init=False, repr=False, compare=False)
    skipped: dict[str, int] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "musique"
    system: ClassVar[str] = (
        "Answer the question from the documents. Give the answer only, in as few words as possible: no sentence."
    )
    metric: ClassVar[Metric] = Metric("contains_em")
    answer_limit: ClassVar[int] = 32
    splits: ClassVar[tuple[str, ...]] = SPLITS
    extractive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("documents", self.documents, 0)
        skipped: Counter[str] = Counter()
        read = _samples(self.path, self.sha256, skipped)
        tuning = _samples(self.tuning, "", skipped) if self.tuning else None
        samples = Divided.of(read, self.share, tuning)
        tuned = _apart(samples.tuning, samples.evaluation, skipped)
        object.__setattr__(self, "samples", replace(samples, tuning=tuned))
        object.__setattr__(self, "skipped", dict(skipped))

    def items(self, split: str, count: int | None = None, *, seed: int = 0) -> list[Item]:
        check_asked(count)
        return [self._item(sample, seed) for sample in self.samples.split(split)[:count]]

    def _item(self, sample: Sample, seed: int) -> Item:
        # without its title a paragraph may be empty; a supporting one is not
        chosen = [(n, p) for n, p in enumerate(sample.paragraphs) if self.with_title or p.text]
        if self.documents:
            draw = random.Random(f"musique {seed} {sample.id}")
            gold = [each for each in chosen if each[1].supporting]
            others = [each for each in chosen if not each[1].supporting]
            if self.documents < len(gold):
                raise InputError("documents", f"must be at least the {len(gold)} gold ones of a sample", self.documents)
            chosen = gold + draw.sample(others, min(len(others), self.documents - len(gold)))
            draw.shuffle(chosen)
        texts = [(n, f"{p.title}\n{p.text}" if self.with_title else p.text) for n, p in chosen]
        made = tuple(Document(text, id=f"musique-{sample.id}-{n}") for n, text in texts)
        places = tuple(place for place, (_, paragraph) in enumerate(chosen) if paragraph.supporting)
        kind = f"{sum(paragraph.supporting for paragraph in sample.paragraphs)} hops"
        return Item(sample.id, made, sample.question, sample.answers, places, sample.id, self.name, kind)


def _apart(tuning: tuple[Sample, ...], evaluation: tuple[Sample, ...], skipped: Counter[str]) -> tuple[Sample, ...]:
    """`tuning` without what stands in `evaluation`."""
    known = {paragraph.known_as for sample in evaluation for paragraph in sample.paragraphs}
    kept = []
    for sample in tuning:
        own = tuple(p for p in sample.paragraphs if p.known_as not in known)
        if sum(p.supporting for p in own) < sum(p.supporting for p in sample.paragraphs):
            skipped["tuning samples whose gold evaluates"] += 1
            continue
        skipped["paragraphs of tuning that stand in evaluation"] += len(sample.paragraphs) - len(own)
        kept.append(replace(sample, paragraphs=own))
    return tuple(kept)


def _samples(path: str | Path, sha256: str, skipped: Counter[str]) -> list[Sample]:
    made = []
    for index, row in enumerate(check_rows(read_rows(path, _FORM, sha256), _FORM)):
        with one_row(f"path[{index}]", _FORM):
            if not row.get("answerable", True):
                skipped["unanswerable"] += 1
                continue
            paragraphs = tuple(
                Paragraph(
                    text_of(p["title"], "title").strip(),
                    text_of(p["paragraph_text"], "paragraph_text").strip(),
                    bool(p["is_supporting"]),
                )
                for p in row["paragraphs"]
            )
            answers = (row["answer"], *row.get("answer_aliases", ()))
            accepted = tuple(dict.fromkeys(each for answer in answers if (each := text_of(answer, "answer").strip())))
            name, question = text_of(row["id"], "id"), text_of(row["question"], "question").strip()
            made.append(Sample(name, question, accepted, paragraphs))
        gold = [p for p in paragraphs if p.supporting]
        if not gold or not all(p.text for p in gold):
            raise InputError(f"path[{index}]", "must have supporting paragraphs, none of them empty", made[-1].id)
    return made
