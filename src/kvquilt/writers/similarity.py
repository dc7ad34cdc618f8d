"""Which documents are alike: BM25 over their token ids."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s
from bm25s.tokenization import Tokenized


def most_similar(segments: Sequence[tuple[int, ...]], wanted: Sequence[int]) -> list[list[int]]:
    """For each of `wanted` (indices) all others that share a token with it, most similar first, earlier ones of equals.

    Args:
        segments: distinct.
    """
    if not wanted:
        return []
    numbers: dict[int, int] = {}  # by first occurrence, as the library numbers nothing by itself then
    texts = [[numbers.setdefault(i, len(numbers)) for i in ids] for ids in segments]
    index = bm25s.BM25()
    index.index(Tokenized(ids=texts, vocab={str(i): n for i, n in numbers.items()}), show_progress=False)
    found = []
    for n in wanted:
        scores = index.get_scores(texts[n])
        ranked = sorted(range(len(segments)), key=lambda other: -scores[other])
        found.append([other for other in ranked if other != n and scores[other] > 0])
    return found
