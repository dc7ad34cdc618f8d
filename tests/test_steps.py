"""Streams that decode at once share forwards, and nobody's fault or pause is anybody else's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvquilt.errors import NumericsError
from kvquilt.model import steps as stepping
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.model.steps import Steps
from tests.engines import QUESTION, at_rest, documents, make_engine
from tests.models import tiny

STREAMS = 6


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy does not part streams that stand ready together."""
    monkeypatch.setattr(stepping, "PATIENCE", 1.0)


def stand(model: LanguageModel, tokens: int, room: int = 8) -> SlotCache:
    cache = model.pool.acquire(tokens + room)
    ids = torch.randint(3, model.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    model.forward(ids, RowPlan(torch.arange(tokens), tokens), cache)
    return cache


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many streams each forward takes a step of."""
    seen: list[int] = []
    together = stepping.forward_together

    def forward(model: LanguageModel, ids: Any, *rest: Any) -> list[torch.Tensor]:
        seen.append(len(ids))
        return together(model, ids, *rest)

    monkeypatch.setattr(stepping, "forward_together", forward)
    return seen


def at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.exception(60) or future.result() for future in [pool.submit(job) for job in jobs]]


@pytest.mark.usefixtures("patient")
def test_streams_share_their_forwards_and_get_what_they_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine() as engine:
        docs = documents(4, 60)
        asked = [(QUESTION, [docs[n % 4], docs[(n + 1) % 4]]) for n in range(STREAMS)]
        alone = [engine.ask(q, d, method="none", max_new_tokens=5).token_ids for q, d in asked]
        seen, gate = counting(monkeypatch), threading.Barrier(STREAMS)

        def streamed(n: int) -> tuple[int, ...]:
            stream = engine.stream(*asked[n], method="none", max_new_tokens=5)
            next(stream, None)
            gate.wait(30)  # all have read their prompts: what follows are steps alone
            return stream.result().token_ids

        assert at_once([lambda n=n: streamed(n) for n in range(STREAMS)]) == alone
        assert max(seen) > 1
        assert sum(seen) == sum(len(ids) - 1 for ids in alone)
        at_rest(engine, conversations=1)


@pytest.mark.usefixtures("patient")
def test_one_broken_stream_fails_alone() -> None:
    model = tiny()
    made, caches = Steps(model), [stand(model, n) for n in (4, 5, 6)]
    caches[1].slot_values[:, :, :, 2] = torch.nan
    counters = [RowCounter() for _ in caches]

    def take(n: int) -> torch.Tensor:
        with made.stream(caches[n]):
            ready.wait(30)
            return made.step(caches[n], 7, counters[n])

    ready = threading.Barrier(3)
    found = at_once([lambda n=n: take(n) for n in range(3)])
    assert isinstance(found[1], NumericsError)
    assert [c.rows for c in counters] == [1, 0, 1]
    assert (caches[0].filled, caches[2].filled) == (5, 7)
    for n in (0, 2):
        fresh = stand(model, (4, 5, 6)[n])
        assert torch.allclose(found[n], made.step(fresh, 7, RowCounter()), atol=1e-4)
        model.pool.release(fresh)
    for cache in caches:
        model.pool.release(cache)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("at", ["before", "after"])
def test_who_is_interrupted_beside_its_turn_holds_nobody(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Having taken the lead but not begun, or having taken others' wishes along and not given them back."""
    model = tiny()
    made, caches, lead, calls = Steps(model), [stand(model, n) for n in (4, 5, 6)], Steps._lead, []

    def interrupted(self: Steps, own: Any) -> None:
        calls.append(own)
        if len(calls) > 1:
            lead(self, own)
            return
        if at == "after":
            with self._changed:
                self._wishes = [wish for wish in self._wishes if wish is own]
        raise KeyboardInterrupt

    monkeypatch.setattr(Steps, "_lead", interrupted)
    ready = threading.Barrier(3)

    def take(n: int) -> torch.Tensor | None:
        with made.stream(caches[n]):
            ready.wait(30)
            try:
                return made.step(caches[n], 7, RowCounter())
            except KeyboardInterrupt:
                return None

    found = at_once([lambda n=n: take(n) for n in range(3)])
    assert [each is None for each in found].count(True) == 1
    assert all(isinstance(each, torch.Tensor) for each in found if each is not None)
    assert (made._wishes, made._leader) == ([], None)
    for cache in caches:
        model.pool.release(cache)


@pytest.mark.usefixtures("patient")
def test_caches_of_different_parts_go_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    made, caches, seen = Steps(model), [stand(model, n) for n in (4, 5, 6)], counting(monkeypatch)
    caches[2].parts = Parts(soft=torch.zeros(1, 64))
    ready = threading.Barrier(3)

    def take(n: int) -> torch.Tensor:
        with made.stream(caches[n]):
            ready.wait(30)
            return made.step(caches[n], 7, RowCounter())

    assert all(isinstance(each, torch.Tensor) for each in at_once([lambda n=n: take(n) for n in range(3)]))
    assert sum(seen) == 3
    assert max(seen) <= 2
    for cache in caches:
        model.pool.release(cache)


def test_a_stream_that_pauses_holds_nobody() -> None:
    model = tiny()
    made, cache, other = Steps(model), stand(model, 4), stand(model, 4)
    with made.stream(cache), made.stream(other):  # which never asks
        found = at_once([lambda: made.step(cache, 7, RowCounter())])
    assert isinstance(found[0], torch.Tensor)
    model.pool.release(cache)
    model.pool.release(other)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("ends", [KeyboardInterrupt, MemoryError])
def test_what_ends_the_thread_that_leads_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, ends: type[BaseException]
) -> None:
    """It is interrupted inside the forward; the others' steps are taken by one of them."""
    model = tiny()
    made, caches, together, calls = Steps(model), [stand(model, n) for n in (4, 5, 6)], stepping.forward_together, []

    def forward(*args: Any) -> list[torch.Tensor]:
        calls.append(threading.get_ident())
        if len(calls) == 1:
            raise ends
        return together(*args)

    monkeypatch.setattr(stepping, "forward_together", forward)
    ready = threading.Barrier(3)

    def take(n: int) -> torch.Tensor | None:
        with made.stream(caches[n]):
            ready.wait(30)
            try:
                return made.step(caches[n], 7, RowCounter())
            except ends:
                return None

    found = at_once([lambda n=n: take(n) for n in range(3)])
    assert [each is None for each in found].count(True) == 1
    assert [cache.filled - n for cache, n in zip(caches, (4, 5, 6), strict=True)] == [
        0 if each is None else 1 for each in found
    ]
    assert made._wishes == []
    for cache in caches:
        model.pool.release(cache)
