"""A write that fails at any step: counted, nothing left behind, nothing lost."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvquilt.store import DiskTier, Failure, FailureReason, Hit, Miss, MissReason, Store, Stored, disk, index
from kvquilt.store.counts import Counts
from tests.store.segments import key_of, make, same, wanted


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "store")
    assert isinstance(tier.put(key_of(make(1)), make(1)), Stored)
    yield tier
    tier.close()


def temporaries(tier: DiskTier) -> list[Path]:
    return [path for path in tier.files.root.rglob("*") if path.suffix == ".tmp"]


def readable(tier: DiskTier, number: int) -> bool:
    answer = tier.get(*wanted(make(number)))
    return isinstance(answer, Hit) and same(answer.segment, make(number))


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


_REASONS = {
    errno.ENOSPC: FailureReason.NO_SPACE,
    errno.EROFS: FailureReason.READ_ONLY,
    errno.EACCES: FailureReason.DENIED,
    errno.EIO: FailureReason.IO_ERROR,
}


@pytest.mark.parametrize("code", list(_REASONS), ids=errno.errorcode.get)
@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
def test_a_refused_step_is_a_counted_failure_that_loses_nothing(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(f"kvquilt.store.files.os.{step}", failing(code))
        assert tier.put(key_of(make(2)), make(2)) == Failure(_REASONS[code])
        assert tier.put(key_of(make(1)), make(1)) == Failure(_REASONS[code])
    assert tier.stats().failures == {_REASONS[code].value: 2}
    assert temporaries(tier) == []
    assert readable(tier, 1)
    assert tier.get(*wanted(make(2))) == Miss(MissReason.ABSENT)
    tier.check_integrity()
    assert isinstance(tier.put(key_of(make(2)), make(2)), Stored)
    assert readable(tier, 2)


def test_a_disk_that_fills_up_in_the_middle_of_a_file_leaves_no_half(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = os.write, []

    def fills_up(handle: int, data: memoryview) -> int:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "full")
        written.append(write(handle, data[:100]))
        return written[-1]

    with monkeypatch.context() as patch:
        patch.setattr("kvquilt.store.files.os.write", fills_up)
        assert tier.put(key_of(make(2)), make(2)) == Failure(FailureReason.NO_SPACE)
    assert temporaries(tier) == []
    assert not tier.contains(key_of(make(2)))


def test_short_writes_are_continued(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr("kvquilt.store.files.os.write", lambda handle, data: write(handle, data[:33]))
        assert isinstance(tier.put(key_of(make(2)), make(2)), Stored)
    assert readable(tier, 2)


def test_an_interrupted_write_leaves_no_temporary_file(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kvquilt.store.files.os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.put(key_of(make(2)), make(2))
    assert temporaries(tier) == []
    tier.check_integrity()
    assert isinstance(tier.put(key_of(make(2)), make(2)), Stored)


def test_a_failed_rename_has_evicted_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(DiskTier(tmp_path)) as sizing:
        answer = sizing.put(key_of(make(1)), make(1))
    assert isinstance(answer, Stored)
    with closing(DiskTier(tmp_path, answer.bytes)) as tier:
        with monkeypatch.context() as patch:
            patch.setattr("kvquilt.store.files.os.replace", failing(errno.ENOSPC))
            assert tier.put(key_of(make(2)), make(2)) == Failure(FailureReason.NO_SPACE)
        assert readable(tier, 1)


def test_an_error_inside_eviction_is_counted_and_the_next_eviction_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = DiskTier(tmp_path / "sizing").put(key_of(make(1)), make(1))
    assert isinstance(size, Stored)
    tier = DiskTier(tmp_path / "store", size.bytes * 2)
    for number in (1, 2):
        tier.put(key_of(make(number)), make(number))
    unlink = os.unlink

    def refuse_victims(path: Path) -> None:
        if path != tier.files.path(key_of(make(3))):
            raise OSError(errno.EACCES, "denied")
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr("kvquilt.store.disk.os.unlink", refuse_victims)
        assert tier.put(key_of(make(3)), make(3)) == Failure(FailureReason.DENIED)
    tier.check_integrity()
    assert readable(tier, 1)
    assert readable(tier, 2)
    assert isinstance(tier.put(key_of(make(3)), make(3)), Stored)
    assert tier.stats().evictions == 1
    tier.check_integrity()
    tier.close()


def test_an_index_that_is_full_fails_the_put_and_nothing_else(tier: DiskTier) -> None:
    assert tier._index is not None
    database = tier._index._db
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    stored, refused = [], []
    for number in range(2, 80):
        answer = tier.put(key_of(make(number)), make(number))
        assert isinstance(answer, Stored) or answer == Failure(FailureReason.NO_SPACE)
        (stored if isinstance(answer, Stored) else refused).append(number)
    assert refused
    assert temporaries(tier) == []
    assert all(readable(tier, number) for number in stored)
    assert not any(tier.contains(key_of(make(number))) for number in refused)
    tier.check_integrity()
    assert tier.stats().segments == len(stored) + 1
    database.execute("PRAGMA max_page_count = 4294967294")
    assert isinstance(tier.put(key_of(make(refused[0])), make(refused[0])), Stored)
    tier.check_integrity()


def test_an_index_that_fails_in_the_middle_of_an_eviction_agrees_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with closing(DiskTier(tmp_path)) as sizing:
        answer = sizing.put(key_of(make(1)), make(1))
    assert isinstance(answer, Stored)
    with closing(DiskTier(tmp_path, answer.bytes)) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(index, "retire", broken)
            assert tier.put(key_of(make(2)), make(2)) == Failure(FailureReason.INDEX)
        tier.check_integrity()
        assert isinstance(tier.put(key_of(make(2)), make(2)), Stored)
        assert readable(tier, 2)
        tier.check_integrity()


def test_uses_that_cannot_be_written_now_are_written_later(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    assert readable(tier, 1)
    with monkeypatch.context() as patch:
        patch.setattr(index, "_USE", "this is not SQL")
        assert next(tier.rows()).frequency == 1
    assert next(tier.rows()).frequency == 2
    assert tier.stats().failures == {"index": 1}


_KILLED = """
import os, signal, sys
from pathlib import Path
from kvquilt.store import DiskTier, index
from tests.store.segments import key_of, make

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def before(module, name):
    setattr(module, name, die)

def after(module, name):
    real = getattr(module, name)
    def then_die(*args, **kwargs):
        real(*args, **kwargs)
        die()
    setattr(module, name, then_die)

def half_written():
    write = os.write
    def write_some(handle, data):
        write(handle, data[:64])
        die()
    os.write = write_some

STEPS = {
    "half-written": half_written,
    "before-fsync": lambda: before(os, "fsync"),
    "after-fsync": lambda: after(os, "fsync"),
    "before-rename": lambda: before(os, "replace"),
    "after-rename": lambda: after(os, "replace"),
    "after-row": lambda: after(index, "put"),
    "after-eviction": lambda: after(index, "retire"),
}
for step, arrange in STEPS.items():
    child = os.fork()
    if child == 0:
        tier = DiskTier(Path(sys.argv[1]) / step, int(sys.argv[2]))
        for number in (1, 2):
            tier.put(key_of(make(number)), make(number))
        arrange()
        tier.put(key_of(make(3)), make(3))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(step, status)
"""


def test_a_writer_killed_at_any_step_leaves_a_sound_store(tmp_path: Path) -> None:
    sizing = DiskTier(tmp_path / "sizing")
    answer = sizing.put(key_of(make(1)), make(1))
    sizing.close()
    assert isinstance(answer, Stored)
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(answer.bytes * 2)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    outcomes = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert len(outcomes) == 7
    assert set(outcomes.values()) == {"-9"}, outcomes
    for step in outcomes:
        tier = DiskTier(tmp_path / step, answer.bytes * 2)
        known = [number for number in (1, 2, 3) if tier.contains(key_of(make(number)))]
        assert len(known) >= 2, step
        assert all(readable(tier, number) for number in known), step
        tier.gc()
        assert temporaries(tier) == [], step
        tier.check_integrity()
        assert isinstance(tier.put(key_of(make(3)), make(3)), Stored)
        assert readable(tier, 3)
        tier.check_integrity()
        tier.close()


def test_gc_spares_the_temporary_files_of_the_living(tier: DiskTier) -> None:
    folder = tier.files.path(key_of(make(1))).parent
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = [f".{os.getpid()}-aa.tmp", f".{gone.pid}-bb.tmp", f".{os.getpid()}-cc.tmp", ".odd.tmp"]
    for name in names:
        (folder / name).write_bytes(b"half")
    long_ago = time.time() - 7200
    os.utime(folder / names[2], (long_ago, long_ago))
    assert tier.gc().temporaries == 3
    assert temporaries(tier) == [folder / names[0]]


def test_a_read_only_store_is_still_read(tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.close()
    monkeypatch.setattr("kvquilt.store.files.os.access", lambda *_: False)
    with Store.open(tmp_path / "store", 0) as store:
        with store.fetch([wanted(make(1))]) as held:
            assert held[0].tier == "disk"
            assert same(held[0].segment, make(1))
        with store.fetch([wanted(make(2))], lambda missing: [(0, make(2))]) as held:
            assert same(held[0].segment, make(2))
        assert store.stats()["disk"].failures == {"read_only": 1}
        assert [row.key for row in store.ls()] == [key_of(make(1))]
        assert store.ls()[0].tokens == 4
        assert store.stats()["disk"].segments == 1
        assert store.write_note(key_of(make(1)).namespace, "note", {}) == Failure(FailureReason.READ_ONLY)
        assert store.rm(key=key_of(make(1))) == 0
        assert store.gc().temporaries == 0
        store.check_integrity()


def test_an_index_that_cannot_be_opened_hides_no_segment(tier: DiskTier, tmp_path: Path) -> None:
    tier.close()
    base = tmp_path / "store" / "v1"
    (base / "index.sqlite").unlink()
    (base / "index.sqlite").mkdir()
    again = DiskTier(tmp_path / "store")
    assert readable(again, 1)
    assert again.put(key_of(make(2)), make(2)) == Failure(FailureReason.INDEX)
    assert again.stats().failures == {"index": 2}


@pytest.mark.parametrize("damage", [b"", b"this is not a database" * 300, None])
def test_a_lost_or_damaged_index_is_rebuilt_from_the_files(
    tier: DiskTier, tmp_path: Path, damage: bytes | None
) -> None:
    tier.put(key_of(make(2, tokens=6)), make(2, tokens=6))
    tier.close()
    place = tmp_path / "store" / "v1" / "index.sqlite"
    place.unlink() if damage is None else place.write_bytes(damage)
    again = DiskTier(tmp_path / "store")
    again.check_integrity()
    assert {row.tokens for row in again.rows()} == {4, 6}
    assert readable(again, 1)
    again.close()


def test_a_file_without_a_row_is_adopted_by_its_first_hit(tier: DiskTier, tmp_path: Path) -> None:
    stranger = DiskTier(tmp_path / "stranger")
    stranger.put(key_of(make(5)), make(5))
    stranger.close()
    target = tier.files.path(key_of(make(5)))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(stranger.files.path(key_of(make(5))).read_bytes())
    assert readable(tier, 5)
    assert tier.stats().segments == 2
    tier.check_integrity()


def test_gc_brings_index_and_files_together(tier: DiskTier, tmp_path: Path) -> None:
    tier.put(key_of(make(2)), make(2))
    content = tier.files.path(key_of(make(2))).read_bytes()
    tier.remove(key_of(make(2)))
    tier.files.path(key_of(make(2))).write_bytes(content)
    tier.files.path(key_of(make(1))).unlink()
    report = tier.gc()
    assert (report.adopted, report.dropped) == (1, 1)
    tier.check_integrity()
    tier.close()
    small = DiskTier(tmp_path / "store", 10)
    assert small.gc().evicted == 1
    assert small.stats().segments == 0
    small.close()


def test_uses_are_counted_across_a_restart_without_writing_on_a_hit(tier: DiskTier, tmp_path: Path) -> None:
    for _ in range(5):
        assert readable(tier, 1)
    tier.close()
    again = DiskTier(tmp_path / "store")
    assert next(again.rows()).frequency == 6
    again.close()


def test_many_uses_are_written_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts()
    database = index.Index(tmp_path / "index.sqlite", list, lambda key: True, counts.hit)
    monkeypatch.setattr(index, "_FLUSH_AFTER", 100)
    for number in range(100):
        database.used(key_of(make(number, tokens=1)), 1, 100)
    flusher = database._flusher
    assert flusher is not None
    flusher.join()
    assert len(database.rows()) == 100
    database.close()
    assert counts.hits == 0


def test_listing_waits_for_no_writer_of_another_process(tier: DiskTier) -> None:
    assert readable(tier, 1)
    before = time.monotonic()
    with closing(sqlite3.connect(tier.files.base / "index.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert next(tier.rows()).frequency == 1, "the use is still to be written"
        stats = tier.stats()
        assert (stats.segments, stats.failures) == (1, {}), "to find it busy is no failure"
        other.execute("ROLLBACK")
    assert time.monotonic() - before < index._BUSY_SECONDS / 2
    assert next(tier.rows()).frequency == 2
    assert tier._index is not None
    assert tier._index._db.execute("PRAGMA busy_timeout").fetchone() == (index._BUSY_SECONDS * 1000,)


def test_what_was_verified_is_remembered_within_bounds(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_VERIFIED_FILES", 2)
    for number in (2, 3):
        tier.put(key_of(make(number)), make(number))
    for number in (1, 2, 3, 1):
        assert readable(tier, number)
        assert len(tier._verified) <= 2
    for key in list(tier._verified):
        os.unlink(tier.files.path(key))  # as another process evicts
        assert isinstance(tier.get(key, ()), Miss)
    assert tier._verified == {}
