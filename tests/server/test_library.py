"""The library beside a file system that fails, loses files, or is slow."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvquilt.errors import StoreUnavailableError
from kvquilt.server.entry import State
from kvquilt.server.library import Library
from kvquilt.server.limits import Limits
from kvquilt.server.texts import Texts, Uploaded


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(Texts(tmp_path), Limits())


def uploaded(id: str, text: str) -> Uploaded:
    return Uploaded.now(id, text, None)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{")], ids=["lost", "damaged"])
def test_a_text_that_was_lost_is_there_when_it_is_sent_again(library: Library, tmp_path: Path, damage: object) -> None:
    (first,) = library.put(None, [uploaded("a", "Rye needs two days.")])
    first.state = State.READY
    (path,) = tmp_path.rglob("*.json")
    assert callable(damage)
    damage(path)
    (again,) = library.put(None, [uploaded("a", "Rye needs two days.")])
    assert library.document(None, "a").text == "Rye needs two days."
    assert again.state is State.QUEUED


def test_of_several_that_cannot_all_be_kept_entries_and_texts_agree(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.put(None, [uploaded("a", "old"), uploaded("c", "old")])
    write = Texts.write

    def full(self: Texts, tenant: str | None, each: Uploaded) -> None:
        if each.id == "c":
            raise StoreUnavailableError("disk", "no space")
        write(self, tenant, each)

    monkeypatch.setattr(Texts, "write", full)
    with pytest.raises(StoreUnavailableError):
        library.put(None, [uploaded("a", "new"), uploaded("b", "new"), uploaded("c", "new"), uploaded("d", "new")])
    for shelf in (library, Library(library.texts, Limits())):  # this one, and the next process's
        found = {id: shelf.document(None, id).text for id in shelf.shelf(None)}
        assert found == {"a": "new", "b": "new", "c": "old"}
        for id, text in found.items():
            assert shelf.get(None, id).digest == uploaded(id, text).digest


def test_who_compiles_reads_no_text_whose_entry_is_still_the_old_one(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.put(None, [uploaded("a", "old")])
    write, written, go_on = Texts.write, threading.Event(), threading.Event()

    def slow(self: Texts, tenant: str | None, each: Uploaded) -> None:
        write(self, tenant, each)
        written.set()
        assert go_on.wait(20)

    monkeypatch.setattr(Texts, "write", slow)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(library.put, None, [uploaded("a", "new")])
        assert written.wait(20)
        read = pool.submit(lambda: (library.kept(None, "a"), library.get(None, "a").digest))
        assert not read.done()
        threading.Timer(0.1, go_on.set).start()
        found, digest = read.result(20)
    assert found is not None
    assert (found.text, found.digest) == ("new", digest)
