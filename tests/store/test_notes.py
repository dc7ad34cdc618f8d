"""Notes beside the segments: whole or absent, and apart for each tenant."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvquilt.errors import InputError
from kvquilt.identity import namespace
from kvquilt.store import Failure, FailureReason, Store, Stored

SPACE = namespace("a")


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_note_is_read_as_written_and_only_by_its_tenant(tmp_path: Path, on_disk: bool) -> None:
    with Store.open(tmp_path if on_disk else None, 0) as store:
        assert store.read_note(SPACE, "gate-1") is None
        content = {"mean": 0.125, "passes": ["none"], "text": "ü\n"}
        assert isinstance(store.write_note(SPACE, "gate-1", {"old": 1}), Stored)
        assert isinstance(store.write_note(SPACE, "gate-1", content), Stored)
        assert store.read_note(SPACE, "gate-1") == content
        assert store.read_note(namespace("b"), "gate-1") is None
        assert store.read_note(namespace(None), "gate-1") is None
    if on_disk:
        with Store.open(tmp_path, 0) as again:
            assert again.read_note(SPACE, "gate-1") == content


def test_a_damaged_note_reads_as_none(tmp_path: Path) -> None:
    with Store.open(tmp_path, 0) as store:
        store.write_note(SPACE, "gate", {"kl": 1.5})
        path = next(tmp_path.rglob("notes/gate.json"))
        content = path.read_text()
        for damaged in (content[:-3], content.replace("1.5", "0.5"), "", "[]", "7", '{"note": 3}', "[" * 10**6):
            path.write_text(damaged)
            assert store.read_note(SPACE, "gate") is None


def test_a_full_disk_keeps_the_old_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with Store.open(tmp_path, 0) as store:
        store.write_note(SPACE, "gate", {"kl": 1})
        with monkeypatch.context() as patch:
            patch.setattr("kvquilt.store.files.os.fsync", full)
            assert store.write_note(SPACE, "gate", {"kl": 2}) == Failure(FailureReason.NO_SPACE)
        assert store.read_note(SPACE, "gate") == {"kl": 1}
        assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["", "../x", "A", "a_b", "a.b", "a" * 129])
def test_a_name_that_could_be_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with Store.open(tmp_path, 0) as store, pytest.raises(InputError, match="name"):
        store.write_note(SPACE, name, {})
    with Store.open(tmp_path, 0) as store, pytest.raises(InputError, match="namespace"):
        store.read_note("..", "gate")


@pytest.mark.parametrize("on_disk", [True, False])
def test_one_note_is_forgotten_and_no_other(tmp_path: Path, on_disk: bool) -> None:
    with Store.open(tmp_path if on_disk else None, 0) as store:
        for name in ("tuned", "gate"):
            store.write_note(SPACE, name, {"name": name})
        store.write_note(namespace("b"), "tuned", {"name": "b"})
        assert store.forget_note(SPACE, "tuned") is True
        assert store.forget_note(SPACE, "tuned") is False
        assert store.read_note(SPACE, "tuned") is None
        assert store.read_note(SPACE, "gate") == {"name": "gate"}
        assert store.read_note(namespace("b"), "tuned") == {"name": "b"}
        with pytest.raises(InputError, match="name"):
            store.forget_note(SPACE, "../x")


def test_a_damaged_note_is_forgotten_too(tmp_path: Path) -> None:
    with Store.open(tmp_path, 0) as store:
        store.write_note(SPACE, "gate", {"kl": 1})
        next(tmp_path.rglob("notes/gate.json")).write_text("damaged")
        assert store.forget_note(SPACE, "gate") is True
        assert not list(tmp_path.rglob("gate.json"))


def test_a_note_that_cannot_be_removed_is_a_failure_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    with Store.open(tmp_path, 0) as store:
        store.write_note(SPACE, "gate", {"kl": 1})
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", denied)
            assert store.forget_note(SPACE, "gate") == Failure(FailureReason.READ_ONLY)
        assert store.read_note(SPACE, "gate") == {"kl": 1}
