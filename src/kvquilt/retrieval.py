"""BM25: which documents to put before the model, and which of them is the best.

Words are compared case-folded and whole, without stop words ("with" may be what the question is about). Scripts that
write no spaces are compared by characters and pairs of characters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import bm25s
from bm25s.tokenization import Tokenized

from kvquilt.document import Document, check_text
from kvquilt.errors import InputError

# Thai, Lao, Burmese, Khmer; kana, CJK ideographs, Hangul syllables, compatibility and supplementary ideographs
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_RUNS = re.compile(f"([{_UNSPACED}]+)|[^\\W{_UNSPACED}]+")


class Index:
    """The word statistics of some documents, kept for repeated questions. Immutable.

    Scores compare documents of one index only: they depend on how often a word occurs among them all.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        self.documents = tuple(documents)
        # own numbering, by first occurrence: bm25s numbers words through a set, so sums would depend on the hash seed
        self._numbers: dict[str, int] = {}
        ids = [[self._numbers.setdefault(w, len(self._numbers)) for w in words(d.text)] for d in self.documents]
        self._bm25 = bm25s.BM25()
        if self._numbers:
            self._bm25.index(Tokenized(ids=ids, vocab=dict(self._numbers)), show_progress=False)

    def scores(self, question: str) -> list[float]:
        """One score per document, in their order; 0 where no word is shared, larger is better."""
        check_text("question", question)
        known = [number for word in words(question) if (number := self._numbers.get(word)) is not None]
        if not known:
            return [0.0] * len(self.documents)
        return [float(score) for score in self._bm25.get_scores(known)]

    def top_k(self, question: str, k: int) -> list[Document]:
        """The `k` best documents (all, if there are fewer) with `score` set, best first; equals keep their order."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise InputError("k", "must be an integer of at least 1", k)
        scores = self.scores(question)
        order = sorted(range(len(scores)), key=lambda n: -scores[n])
        return [dataclasses.replace(self.documents[n], score=scores[n]) for n in order[:k]]


def rank(question: str, documents: Sequence[Document]) -> list[float]:
    """BM25 score of every document for the question; see `Index.scores`."""
    return Index(documents).scores(question)


def top_k(question: str, documents: Sequence[Document], k: int) -> list[Document]:
    """The `k` best documents for the question; see `Index.top_k`."""
    return Index(documents).top_k(question, k)


def words(text: str) -> list[str]:
    """What is counted of a text: words, the parts of ``snake_case`` too; characters and pairs in unspaced scripts."""
    found: list[str] = []
    for run in _RUNS.finditer(text.casefold()):
        word = run.group()
        if run.group(1):
            found += [*word, *(word[n : n + 2] for n in range(len(word) - 1))]
        else:
            found.append(word)
            if "_" in word:
                found += [part for part in word.split("_") if part]
    return found


def ranked_documents(question: str, documents: Sequence[Document]) -> list[int]:
    """Indices of the documents, best first: by the scores that came with them, else by BM25; of equals the first."""
    if not documents:
        return []
    if any(d.score is not None for d in documents):
        scores = [float("-inf") if d.score is None else d.score for d in documents]
    else:
        scores = rank(question, documents)
    return sorted(range(len(scores)), key=lambda n: -scores[n])
