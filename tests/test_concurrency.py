"""Threads that ask, stream and compile at once get the answers they would get alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvquilt import Document, Engine
from kvquilt.errors import ConversationError
from tests.engines import AFFORDABLE, QUESTION, at_rest, documents, make_engine, stored_bytes

WORKERS = 6


def together(jobs: list[Callable[[], object]]) -> list[object]:
    """Results in order, all begun behind one barrier; an exception of any is raised."""
    gate = threading.Barrier(len(jobs))

    def begun(job: Callable[[], object]) -> object:
        gate.wait(timeout=30)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(begun, job) for job in jobs]]


@pytest.mark.usefixtures("nan_slots")
def test_asking_and_streaming_at_once_gives_the_answers_of_each_alone(tmp_path: Path) -> None:
    docs = documents(4, 60)
    orders = [[docs[(n + k) % 4] for k in range(4)] for n in range(4)]
    wanted = [(method, order) for method in AFFORDABLE.values() for order in orders]
    with make_engine(directory=tmp_path, trained=True) as engine:
        alone = [engine.ask(QUESTION, order, method=method).token_ids for method, order in wanted]
        before = stored_bytes(engine)

        def asked(method: str, order: list[Document]) -> object:
            return engine.ask(QUESTION, order, method=method).token_ids

        def streamed(method: str, order: list[Document]) -> object:
            stream = engine.stream(QUESTION, order, method=method)
            text = "".join(stream)
            assert text == stream.answer.text
            return stream.answer.token_ids

        jobs = [lambda w=w, f=f: f(*w) for n, w in enumerate(wanted) for f in ((asked, streamed)[n % 2],)]
        for first in range(0, len(jobs), WORKERS):
            assert together(jobs[first : first + WORKERS]) == alone[first : first + WORKERS]
        assert stored_bytes(engine) == before
        at_rest(engine, conversations=1)
    assert engine.model.pool.lent == 0


def test_one_missing_segment_wanted_by_many_is_compiled_once() -> None:
    docs = documents(3, 60)
    with make_engine(shared_prefix=False) as engine:
        reader = make_engine(shared_prefix=False)
        truth = reader.ask(QUESTION, docs, method="none").token_ids
        reader.close()

        def ask() -> object:
            return engine.ask(QUESTION, docs, method="none")

        answers = together([ask] * WORKERS)
        assert {a.token_ids for a in answers} == {truth}  # type: ignore[attr-defined]
        assert sum(a.ledger.forward_tokens["compile"] > 0 for a in answers) == 1  # type: ignore[attr-defined]
        assert len(engine.store.ls()) == 4
        at_rest(engine, conversations=1)


def test_compiling_while_asking(tmp_path: Path) -> None:
    docs = [Document(f"{d.text} {n}", id=str(n)) for n, d in enumerate(documents(4, 60) * 4)]
    with make_engine(directory=tmp_path) as engine:
        truth = engine.ask(QUESTION, docs[:3], method="full").token_ids

        def compile_part(first: int) -> Callable[[], object]:
            return lambda: engine.compile(docs[first : first + 8], gate=False).documents

        def ask() -> object:
            return engine.ask(QUESTION, docs[:3], method="full").token_ids

        out = together([compile_part(0), compile_part(4), compile_part(8), ask, ask])
        assert out == [8, 8, 8, truth, truth]
        assert len(stored_bytes(engine)) == len(docs)
        at_rest(engine, conversations=1)


def test_cancelled_and_finished_at_once(tmp_path: Path) -> None:
    docs = documents(3, 60)
    with make_engine(directory=tmp_path, conversations=2) as engine:
        truth = engine.ask(QUESTION, docs, method="none", max_new_tokens=6).token_ids

        def cancelled() -> object:
            stream = engine.stream(QUESTION, docs, method="none", max_new_tokens=6)
            next(stream)
            stream.cancel()
            return stream.answer.stop_reason

        def finished() -> object:
            return engine.ask(QUESTION, docs, method="none", max_new_tokens=6).token_ids

        out = together([cancelled, finished] * 3)
        assert out == ["cancelled", truth] * 3
        at_rest(engine, conversations=2)


def test_only_one_of_many_follow_ups_gets_the_conversation() -> None:
    with make_engine(conversations=WORKERS) as engine:
        answer = engine.ask(QUESTION, documents(2, 60), method="full")

        def follow() -> object:
            try:
                return answer.follow_up("And?").token_ids
            except ConversationError:
                return None

        out = together([follow] * WORKERS)
        assert sum(ids is not None for ids in out) == 1
        at_rest(engine, conversations=1)


def test_two_engines_on_one_model_and_one_directory(tmp_path: Path) -> None:
    docs = documents(4, 60)
    one, two = make_engine(directory=tmp_path), make_engine(directory=tmp_path)
    engines: list[Engine] = [one, two]
    try:
        truth = one.ask(QUESTION, docs, method="none").token_ids
        out = together([lambda e=e: e.ask(QUESTION, docs, method="none").token_ids for e in engines * 2])
        assert out == [truth] * 4
        assert stored_bytes(one) == stored_bytes(two)
        for engine in engines:
            engine.store.check_integrity()
    finally:
        one.close()
        two.close()
    assert one.model.pool.lent == 0
