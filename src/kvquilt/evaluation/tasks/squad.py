"""SQuAD and its like, XQuAD among them: one paragraph answers, others of the same article stand beside it.

Files are no part of this project; the caller names one (Rajpurkar et al., 2016; Artetxe et al., 2020).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.checks import check_count, check_name
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.leakage import check_documents_apart, known
from kvquilt.evaluation.tasks.rows import one_row, read_rows, text_of
from kvquilt.evaluation.tasks.splits import SPLITS, Divided, check_asked, in_turns

_FORM = "must be SQuAD's: data [title, paragraphs [context, qas [id, question, answers [text]]]], or rows of the hub"


@dataclass(frozen=True, slots=True)
class Question:
    """`paragraph`: the article's index of it."""

    id: str
    text: str = field(repr=False)
    answers: tuple[str, ...] = field(repr=False)
    paragraph: int


@dataclass(frozen=True, slots=True)
class Article:
    """`index`: its place in the file; `paragraphs`: each text once."""

    index: int
    title: str
    paragraphs: tuple[str, ...] = field(repr=False)
    questions: tuple[Question, ...] = field(repr=False)

    def document(self, paragraph: int) -> Document:
        return Document(self.paragraphs[paragraph], id=f"squad-{self.index}-{paragraph}")


@dataclass(frozen=True, slots=True)
class SquadTask:
    """Questions of a file's articles: the first half of the articles tunes, the second evaluates. Group is the article.

    Articles take turns, so that a few items rest on many of them.

    Attributes:
        path: the file, or a data set (see `read_rows`).
        tuning: the file that tunes; without one, the first `share` of `path`'s articles do.
        documents: how many an item has, the gold paragraph among others, drawn and shuffled; fewer where there are.
        company: others of the same article, or (``others``) of other articles of the split.
        sha256: what the digest of `path` must be.
        articles: what was read.
        skipped: questions left out, by the reason.

    Raises:
        InputError: a file that cannot be read or has another form, a setting out of its range.
        LeakageError: a paragraph would tune and evaluate.
    """

    path: str | Path
    tuning: str | Path = ""
    share: float = 0.5
    documents: int = 5
    company: Literal["article", "others"] = "article"
    sha256: str = ""
    articles: Divided[Article] = field(init=False, repr=False, compare=False)
    skipped: dict[str, int] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "squad"
    system: ClassVar[str] = (
        "Answer the question from the documents. Give the answer only, in the words of the documents: no sentence."
    )
    metric: ClassVar[Metric] = Metric("contains_em")
    answer_limit: ClassVar[int] = 32
    splits: ClassVar[tuple[str, ...]] = SPLITS
    extractive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("documents", self.documents, 1)
        check_name("company", self.company, ("article", "others"))
        skipped: Counter[str] = Counter()
        read = _articles(read_rows(self.path, _FORM, self.sha256), skipped)
        tuning = _articles(read_rows(self.tuning, _FORM), skipped) if self.tuning else None
        articles = Divided.of(read, self.share, tuning)
        tuned, evaluation = (
            [article.document(n) for article in some for n in range(len(article.paragraphs))]
            for some in (articles.tuning, articles.evaluation)
        )
        check_documents_apart("tuning", tuned, known(evaluation))
        object.__setattr__(self, "articles", articles)
        object.__setattr__(self, "skipped", dict(skipped))

    def items(self, split: str, count: int | None = None, *, seed: int = 0) -> list[Item]:
        check_asked(count)
        articles = self.articles.split(split)
        asked = in_turns([[(article, question) for question in article.questions] for article in articles])
        return [self._item(article, question, articles, seed) for article, question in asked[:count]]

    def _item(self, article: Article, question: Question, articles: tuple[Article, ...], seed: int) -> Item:
        draw = random.Random(f"squad {seed} {question.id}")
        beside = [article] if self.company == "article" else [a for a in articles if a is not article]
        others = [(a, n) for a in beside for n in range(len(a.paragraphs)) if (a, n) != (article, question.paragraph)]
        chosen = draw.sample(others, min(len(others), self.documents - 1))
        chosen.append((article, question.paragraph))
        draw.shuffle(chosen)
        documents = tuple(a.document(n) for a, n in chosen)
        gold = chosen.index((article, question.paragraph))
        return Item(question.id, documents, question.text, question.answers, (gold,), article.title, self.name)


def _articles(read: Any, skipped: Counter[str]) -> list[Article]:
    if isinstance(read, list):
        return _hub_articles(read, skipped)
    made = []
    try:
        given = list(read["data"])
    except (KeyError, TypeError) as error:
        raise InputError("path", _FORM, type(error).__name__) from error
    for index, article in enumerate(given):
        with one_row(f"path.data[{index}]", _FORM):
            rows = [(p["context"], qa) for p in article["paragraphs"] for qa in p["qas"]]
            contexts = [p["context"] for p in article["paragraphs"]]
            made.append(_article(index, article["title"], contexts, rows, skipped))
    return _checked(made)


def _hub_articles(rows: list[Any], skipped: Counter[str]) -> list[Article]:
    """Rows of the hub are questions, article by article: ``answers`` is a dict of lists.

    Where they have no title, as XQuAD's there, a paragraph is an article of its own.
    """
    made = []
    with one_row("path", _FORM):
        for index, (_, group) in enumerate(groupby(rows, lambda row: row.get("title") or row["context"])):
            asked = [(row["context"], row | {"answers": _answers(row["answers"])}) for row in group]
            title = asked[0][1].get("title") or f"paragraph-{index}"
            made.append(_article(index, title, [context for context, _ in asked], asked, skipped))
    return _checked(made)


def _answers(given: Any) -> list[dict[str, Any]]:
    return [{"text": text} for text in given["text"]]


def _article(
    index: int, title: object, contexts: list[Any], rows: list[tuple[Any, Any]], skipped: Counter[str]
) -> Article:
    paragraphs = tuple(dict.fromkeys(text_of(context, "context").strip() for context in contexts))
    questions = []
    for context, row in rows:
        answers = tuple(dict.fromkeys(each for a in row["answers"] if (each := text_of(a["text"], "answers").strip())))
        if not answers:
            skipped["unanswerable"] += 1
            continue
        place = paragraphs.index(context.strip())
        name, text = text_of(row["id"], "id"), text_of(row["question"], "question").strip()
        questions.append(Question(name, text, answers, place))
    return Article(index, text_of(title, "title"), paragraphs, tuple(questions))


def _checked(articles: list[Article]) -> list[Article]:
    """Those that ask something; titles tell them apart."""
    asking = [article for article in articles if article.questions]
    if not asking:
        raise InputError("path", _FORM, "no question")
    if len({article.title for article in asking}) < len(asking):
        raise InputError("path", "titles must tell articles apart: a title comes up twice")
    return asking
