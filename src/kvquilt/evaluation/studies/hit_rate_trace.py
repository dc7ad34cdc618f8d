"""Requests as a service gets them: who asks when, under which system prompt, over which documents.

    prompt    system text (one of several) | time stamp | documents | question

Documents are asked for by Zipf's law. Arrivals are a Poisson process; a stamp changes with the clock, so requests in
the same tick share it, and a coarse clock (a date) is shared by many.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.checks import check_count, check_name

Numbers = NDArray[np.int64]
ORDERS = ("shuffled", "stable")
_SPREAD = 0.5  # of the logarithms of documents' lengths
_RACE = 256  # up to so many documents, drawing without replacement is a race of all of them
_RACE_CELLS = 1 << 22


@dataclass(frozen=True, slots=True)
class Traffic:
    """What requests are like.

    Attributes:
        exponent: of Zipf's law; 0 asks for all documents alike.
        per_request: different documents in a prompt.
        order: ``shuffled``, or ``stable``: two documents always stand in the same order, as a retriever that ranks by
            a score of the document alone would have it.
        systems: system prompts, each as likely as the others.
        stamp_tokens: 0 for no stamp. `stamp_seconds`: a tick of its clock. `rate`: requests per second.
        shortest, mean, longest: tokens of documents, drawn from a log-normal distribution and cut at both ends.
        drift_every: requests after which a tenth of the documents change their rank with another; 0 for never.

    Raises:
        InputError: a number out of its range, more documents in a prompt than there are.
    """

    requests: int = 4000
    documents: int = 2000
    exponent: float = 1.0
    per_request: int = 5
    order: str = "shuffled"
    systems: int = 4
    system_tokens: int = 150
    stamp_tokens: int = 12
    stamp_seconds: float = 1.0
    question_tokens: int = 40
    shortest: int = 300
    mean: int = 800
    longest: int = 2000
    rate: float = 1.0
    drift_every: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "documents", "systems", "question_tokens", "shortest"):
            check_count(name, getattr(self, name), 1)
        for name in ("system_tokens", "stamp_tokens", "drift_every", "seed"):
            check_count(name, getattr(self, name), 0)
        check_count("per_request", self.per_request, 1, self.documents)
        check_count("mean", self.mean, self.shortest)
        check_count("longest", self.longest, self.mean)
        check_name("order", self.order, ORDERS)
        if not 0 <= self.exponent <= 4:
            raise InputError("exponent", "must be a number from 0 to 4", self.exponent)
        for name in ("stamp_seconds", "rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(name, "must be a finite number above 0", getattr(self, name))


@dataclass(frozen=True, eq=False)
class Trace:
    """Drawn requests; all arrays go by request, those of lengths by what they are lengths of.

    Attributes:
        stamps: tick of the clock. `documents`: ``[requests, per request]``, in the order of the prompt.
        stamp_tokens, question_tokens: of each request.
    """

    times: NDArray[np.float64] = field(repr=False)
    systems: Numbers = field(repr=False)
    stamps: Numbers = field(repr=False)
    documents: Numbers = field(repr=False)
    lengths: Numbers = field(repr=False)
    system_lengths: Numbers = field(repr=False)
    stamp_tokens: Numbers = field(repr=False)
    question_tokens: Numbers = field(repr=False)

    @cached_property
    def prompt_tokens(self) -> Numbers:
        """Of each request."""
        beside = self.system_lengths[self.systems] + self.stamp_tokens + self.question_tokens
        total: Numbers = beside + self.lengths[self.documents].sum(1)
        return total


def draw(traffic: Traffic) -> Trace:
    """The same traffic gives the same trace; one of another exponent has the same documents, times and systems."""
    lengths, arrivals, ranks, order, drift = (np.random.default_rng([traffic.seed, n]) for n in range(5))
    times = arrivals.exponential(1 / traffic.rate, traffic.requests).cumsum()
    logarithm = np.log(traffic.mean) - _SPREAD**2 / 2
    drawn = lengths.lognormal(logarithm, _SPREAD, traffic.documents)
    documents = _documents_by_rank(traffic, drift)
    asked = _ranks(traffic, ranks)
    period = np.arange(traffic.requests) // traffic.drift_every if traffic.drift_every else 0
    named = documents[period, asked.T].T
    if traffic.order == "shuffled":
        named = order.permuted(named, axis=1)
    else:
        place = order.permutation(traffic.documents)
        named = np.take_along_axis(named, place[named].argsort(1), 1)
    return Trace(
        times,
        arrivals.integers(0, traffic.systems, traffic.requests),
        np.floor(times / traffic.stamp_seconds).astype(np.int64),
        named,
        np.rint(drawn).astype(np.int64).clip(traffic.shortest, traffic.longest),
        np.full(traffic.systems, traffic.system_tokens),
        np.full(traffic.requests, traffic.stamp_tokens),
        np.full(traffic.requests, traffic.question_tokens),
    )


def _documents_by_rank(traffic: Traffic, random: np.random.Generator) -> Numbers:
    """``[periods, documents]``: who has which rank."""
    now = random.permutation(traffic.documents)
    rows = [now]
    periods = -(-traffic.requests // traffic.drift_every) if traffic.drift_every else 1
    for _ in range(periods - 1):
        now = now.copy()
        pairs = random.choice(traffic.documents, (traffic.documents // 10, 2), replace=True)
        for one, other in pairs.tolist():
            now[[one, other]] = now[[other, one]]
        rows.append(now)
    return np.stack(rows)


def _ranks(traffic: Traffic, random: np.random.Generator) -> Numbers:
    """``[requests, per request]``, different ones, as if drawn one after the other without replacement."""
    weights = np.arange(1, traffic.documents + 1, dtype=np.float64) ** -traffic.exponent
    n, k = traffic.requests, traffic.per_request
    if traffic.documents <= _RACE:
        # each document's time to arrive is exponential with its weight as rate; the first k to arrive are drawn
        step = max(1, _RACE_CELLS // traffic.documents)
        parts = []
        for first in range(0, n, step):
            race = random.standard_exponential((min(step, n - first), traffic.documents)) / weights
            parts.append(np.argpartition(race, k - 1, axis=1)[:, :k])
        return np.concatenate(parts)
    edges = weights.cumsum() / weights.sum()
    out = np.searchsorted(edges, random.random((n, k)), side="right").clip(max=traffic.documents - 1)
    for column in range(1, k):
        again = np.arange(n)
        while len(again := again[(out[again, :column] == out[again, column, None]).any(1)]):
            out[again, column] = np.searchsorted(edges, random.random(len(again)), side="right")
        out[:, column] = out[:, column].clip(max=traffic.documents - 1)
    return out
