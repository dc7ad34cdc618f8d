"""Token hit rates of prefix caching and of reuse by segment on one trace, without a model.

An arm is ``prefix`` (blocks, least recently used first, as vLLM's), or ``segments:POLICY``; ``unbounded`` in place of
a policy, or behind ``prefix:``, is a cache that holds everything. System texts and documents are segments; stamps and
questions are always computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import InputError
from kvquilt.evaluation.studies.hit_rate_caches import POLICIES, BlockCache, SegmentCache, find_policy
from kvquilt.evaluation.studies.hit_rate_model import ModelSize
from kvquilt.evaluation.studies.hit_rate_trace import Numbers, Trace

PREFIX, SEGMENTS, UNBOUNDED = "prefix", "segments", "unbounded"
ARMS = (PREFIX, *(f"{SEGMENTS}:{name}" for name in POLICIES), f"{PREFIX}:{UNBOUNDED}", f"{SEGMENTS}:{UNBOUNDED}")
_PERIODS = 20


@dataclass(frozen=True, eq=False, slots=True)
class Simulated:
    """What one cache did on a trace.

    Attributes:
        prompt, hits: tokens of each request, and of them those that were there.
        documents, document_hits: of documents alone.
        flops, saved: operations of each request's full prefill, and of them those of tokens that were there.
        evictions: segments, or blocks. `refused`: segments that no room could be made for.
        held: tokens at the end.
    """

    arm: str
    prompt: Numbers = field(repr=False)
    hits: Numbers = field(repr=False)
    documents: Numbers = field(repr=False)
    document_hits: Numbers = field(repr=False)
    flops: NDArray[np.float64] = field(repr=False)
    saved: NDArray[np.float64] = field(repr=False)
    evictions: int
    refused: int
    held: int

    @property
    def token_hit_rate(self) -> float:
        return float(self.hits.sum() / self.prompt.sum())

    def as_dict(self, bytes_per_token: int) -> dict[str, Any]:
        """Figures, ready for JSON; ``over_time`` in twentieths of the trace."""
        parts = zip(np.array_split(self.hits, _PERIODS), np.array_split(self.prompt, _PERIODS), strict=True)
        return {
            "arm": self.arm,
            "token_hit_rate": round(self.token_hit_rate, 6),
            "document_token_hit_rate": round(float(self.document_hits.sum() / self.documents.sum()), 6),
            "flops_saved": round(float(self.saved.sum() / self.flops.sum()), 6),
            "tokens": int(self.prompt.sum()),
            "hit_tokens": int(self.hits.sum()),
            "recomputed_tokens": int((self.prompt - self.hits).sum()),
            "bytes_read": int(self.hits.sum()) * bytes_per_token,
            "bytes_held": self.held * bytes_per_token,
            "evictions": self.evictions,
            "refused": self.refused,
            "over_time": [round(float(h.sum() / p.sum()), 4) for h, p in parts if len(p)],
        }


def simulate(trace: Trace, arm: str, capacity: int, size: ModelSize, bytes_per_token: int | None = None) -> Simulated:
    """Replay `trace` through the cache of `arm`.

    Args:
        capacity: tokens.
        size: what recomputing costs.
        bytes_per_token: of the cache; None for what `size` says.

    Raises:
        InputError: an unknown arm; a cache that no document fits into.
    """
    kind, _, policy = arm.partition(":")
    bound = None if policy == UNBOUNDED else capacity
    if kind not in (PREFIX, SEGMENTS) or (kind == PREFIX and policy not in ("", UNBOUNDED)):
        raise InputError("arms", f"must be among {', '.join(ARMS)}", arm)
    if bound is not None and bound < int(trace.lengths.min()):
        raise InputError("capacity", f"must hold a document, the shortest has {trace.lengths.min()} tokens", capacity)
    if kind == PREFIX:
        blocks = BlockCache(bound)
        hits, document_hits, saved = _prefixes(trace, blocks, size)
        evictions, refused, held = blocks.evictions, 0, blocks.held
    else:
        segments = SegmentCache(
            find_policy("lru" if policy == UNBOUNDED else policy), bound, bytes_per_token or size.bytes_per_token
        )
        hits, document_hits, saved = _segments(trace, segments, size)
        evictions, refused, held = segments.evictions, segments.refused, segments.held
    flops = np.array([size.flops(0, int(n)) for n in trace.prompt_tokens])
    documents = trace.lengths[trace.documents].sum(1)
    return Simulated(arm, trace.prompt_tokens, hits, documents, document_hits, flops, saved, evictions, refused, held)


_Found = tuple[Numbers, Numbers, NDArray[np.float64]]


def _prefixes(trace: Trace, cache: BlockCache, size: ModelSize) -> _Found:
    lengths, systems = trace.lengths.tolist(), trace.system_lengths.tolist()
    first = len(lengths)  # pieces: documents, system texts, stamps, and below 0 questions, none of which comes twice
    hits, opening = [], []
    for n, (system, stamp, documents, stamped, asked) in enumerate(_requests(trace)):
        pieces = [(first + system, systems[system]), (first + len(systems) + stamp, stamped)]
        pieces += [(d, lengths[d]) for d in documents]
        hits.append(cache.request([*pieces, (-1 - n, asked)]))
        opening.append(systems[system] + stamped)
    found = np.array(hits)
    inside = np.minimum((found - np.array(opening)).clip(min=0), trace.lengths[trace.documents].sum(1))
    return found, inside, np.array([size.flops(0, hit) for hit in hits])


def _segments(trace: Trace, cache: SegmentCache, size: ModelSize) -> _Found:
    lengths, systems = trace.lengths.tolist(), trace.system_lengths.tolist()
    first = len(lengths)
    work = [size.flops(0, n) for n in [*lengths, *systems]]  # of a segment by itself
    hits, inside, saved = [], [], []
    for system, _, documents, stamped, _ in _requests(trace):
        wanted = [(d, lengths[d], work[d]) for d in documents]
        if systems[system]:
            wanted.insert(0, (first + system, systems[system], work[first + system]))
        # the stamp stands before the documents, behind a system text if there is one
        at, hit, own, spared = 0 if systems[system] else stamped, 0, 0, 0.0
        for (key, tokens, _), there in zip(wanted, cache.request(wanted), strict=True):
            if there:
                hit += tokens
                own += tokens if key < first else 0
                spared += size.flops(at, at + tokens)
            at += tokens if key < first else tokens + stamped
        hits.append(hit)
        inside.append(own)
        saved.append(spared)
    return np.array(hits), np.array(inside), np.array(saved)


def _requests(trace: Trace) -> Sequence[tuple[int, int, list[int], int, int]]:
    """System, stamp, documents, tokens of stamp and of question."""
    columns = (trace.systems, trace.stamps, trace.documents, trace.stamp_tokens, trace.question_tokens)
    return list(zip(*(each.tolist() for each in columns), strict=True))
