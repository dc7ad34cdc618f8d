"""Notes about documents: apart for tenants and models, ids packed, uses collected."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvquilt.errors import IntegrityError
from kvquilt.identity import namespace
from kvquilt.store import Failure, FailureReason, Store
from kvquilt.writers.notebook import Notebook, NotebookStats, Use, pack, unpack
from tests.engines import QUESTION, at_rest, documents, make_engine


def test_a_note_is_of_one_tenant_one_model_one_kind_and_one_subject() -> None:
    store = Store.open(None, 0)
    mine = Notebook(store, namespace("a"), "model", 100)
    assert mine.write("kind", "subject", {"x": 1})
    assert mine.read("kind", "subject") == {"x": 1}
    assert mine.read("kind", "other") is None
    assert mine.read("another", "subject") is None
    assert Notebook(store, namespace("b"), "model", 100).read("kind", "subject") is None
    assert Notebook(store, namespace("a"), "other model", 100).read("kind", "subject") is None
    assert Notebook(store, namespace("a"), "model", 100).read("kind", "subject") == {"x": 1}


@pytest.mark.parametrize("ids", [(), (0,), (1, 2, 3), tuple(range(5000)), ((1 << 31) - 1,)])
def test_ids_are_unpacked_as_they_were_packed(ids: tuple[int, ...]) -> None:
    assert unpack(pack(ids), 1 << 31) == ids


def test_ids_without_an_embedding_are_no_ids() -> None:
    assert unpack(pack((0, 99)), 100) == (0, 99)
    assert unpack(pack((0, 100)), 100) is None


@pytest.mark.parametrize("text", [None, 3, [1], "AAA", "AAAA", "ä", " AAAAAA==", "////////////////", b"AAAAAA=="])
def test_anything_else_is_no_ids(text: object) -> None:
    assert unpack(text, 1 << 31) is None


def test_uses_are_counted_from_any_thread_and_taken_once() -> None:
    notes = Notebook(Store.open(None, 0), namespace(None), "model", 100)
    with ThreadPoolExecutor(8) as pool:
        waiting = list(pool.map(lambda n: notes.use("subject", "ab"[n % 2], 0.5), range(400)))
    assert sorted(waiting) == list(range(1, 401))
    assert notes.take_uses("other") == {}
    assert notes.take_uses("subject") == {"a": Use(200, 100.0), "b": Use(200, 100.0)}
    assert notes.take_uses("subject") == {}


def test_what_was_lost_is_counted_and_logged_once_until_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notebook(Store.open(None, 0), namespace(None), "model", 100)
    for subject in ("a", "b", "a"):
        notes.lose("kind", subject)
    assert notes.stats() == NotebookStats(waiting=0, subjects=0, failures=0, lost=2)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert notes.write("kind", "a", {})
    assert notes.stats().lost == 1
    notes.lose("kind", "a")
    assert notes.stats().lost == 2


def test_stats_count_waiting_uses_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(None, 0)
    notes = Notebook(store, namespace(None), "model", 100)
    for subject, what in (("a", "x"), ("a", "y"), ("a", "x"), ("b", "x")):
        notes.use(subject, what, 0.5)
    monkeypatch.setattr(store, "write_note", lambda *_: Failure(FailureReason.NO_SPACE))
    assert not notes.write("kind", "a", {})
    assert notes.stats() == NotebookStats(waiting=4, subjects=2, failures=1, lost=0)
    notes.check_integrity()


@pytest.mark.parametrize("saved", [-0.5, float("nan"), float("inf")])
def test_a_use_that_no_note_may_hold_breaks_integrity(saved: float) -> None:
    notes = Notebook(Store.open(None, 0), namespace(None), "model", 100)
    notes.use("subject", "x", saved)
    with pytest.raises(IntegrityError, match="1 uses of subject"):
        notes.check_integrity()


def test_who_only_looks_reads_the_same_notes_and_counts_no_use() -> None:
    notes = Notebook(Store.open(None, 0), namespace(None), "model", 100)
    notes.write("kind", "subject", {"x": 1})
    looking = notes.apart()
    assert looking.read("kind", "subject") == {"x": 1}
    looking.use("subject", "x", 0.5)
    looking.lose("kind", "subject")
    assert notes.stats() == NotebookStats(waiting=0, subjects=0, failures=0, lost=1)


def test_an_engine_says_once_that_a_note_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    with make_engine() as engine:
        docs = documents(4)
        engine.compile(docs, gate=False, method="fusionrag")
        places = list(engine.store._notes._memory)
        assert len(places) == 4
        for place in places:
            engine.store.write_note(*place, {"prefix": pack((engine.model.vocabulary,))})
        for _ in range(2):
            ledger = engine.ask(QUESTION, docs[:2], method="fusionrag:1000000").ledger
            assert "not_prepared" in {fallback.reason for fallback in ledger.fallbacks}
        assert len([record for record in caplog.records if "cannot be used" in record.message]) == 2
        assert engine.reader.notes(None).stats().lost == 2
        at_rest(engine, conversations=1)
