"""Notes about documents: apart for tenants and models, ids packed, uses collected."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvquilt.identity import namespace
from kvquilt.store import Store
from kvquilt.writers.notebook import Notebook, Use, pack, unpack


def test_a_note_is_of_one_tenant_one_model_one_kind_and_one_subject() -> None:
    store = Store.open(None, 0)
    mine = Notebook(store, namespace("a"), "model")
    assert mine.write("kind", "subject", {"x": 1})
    assert mine.read("kind", "subject") == {"x": 1}
    assert mine.read("kind", "other") is None
    assert mine.read("another", "subject") is None
    assert Notebook(store, namespace("b"), "model").read("kind", "subject") is None
    assert Notebook(store, namespace("a"), "other model").read("kind", "subject") is None
    assert Notebook(store, namespace("a"), "model").read("kind", "subject") == {"x": 1}


@pytest.mark.parametrize("ids", [(), (0,), (1, 2, 3), tuple(range(5000)), ((1 << 31) - 1,)])
def test_ids_are_unpacked_as_they_were_packed(ids: tuple[int, ...]) -> None:
    assert unpack(pack(ids)) == ids


@pytest.mark.parametrize("text", [None, 3, [1], "AAA", "AAAA", "ä", " AAAAAA==", "////////////////", b"AAAAAA=="])
def test_anything_else_is_no_ids(text: object) -> None:
    assert unpack(text) is None


def test_uses_are_counted_from_any_thread_and_taken_once() -> None:
    notes = Notebook(Store.open(None, 0), namespace(None), "model")
    with ThreadPoolExecutor(8) as pool:
        waiting = list(pool.map(lambda n: notes.use("subject", "ab"[n % 2], 0.5), range(400)))
    assert sorted(waiting) == list(range(1, 401))
    assert notes.take_uses("other") == {}
    assert notes.take_uses("subject") == {"a": Use(200, 100.0), "b": Use(200, 100.0)}
    assert notes.take_uses("subject") == {}
