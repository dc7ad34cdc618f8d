"""A writer's folder is replaced as a whole, wherever saving ends and whoever reads meanwhile; other files stay."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import WriterError
from kvquilt.writers import folder
from kvquilt.writers.artefact import load_writer
from kvquilt.writers.folder import ADAPTER, CONFIG, MANIFEST, SOFT_TOKENS
from tests.models import tiny
from tests.writers.trained import contents, equal, random_writer


def test_a_save_that_ends_anywhere_leaves_the_old_or_the_new_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = random_writer(tiny(), "joint", seed=1), random_writer(tiny(), "kv-packet", seed=2)
    operations = [(os, "fsync"), (Path, "replace"), (Path, "unlink"), (shutil, "rmtree"), (Path, "mkdir")]
    seen, ends = set(), 0
    for at in range(1000):
        path = tmp_path / str(at)
        old.save(path)
        with monkeypatch.context() as patched:
            count = _ending(patched, operations, at)
            try:
                new.save(path)
            except KeyboardInterrupt:
                ends += 1
            else:
                assert count[0] <= at
                break
        found = load_writer(path)
        assert equal(found, old) or equal(found, new)
        seen.add(found.kind)
        third = random_writer(tiny(), "sempic", seed=3)
        third.save(path)
        assert equal(load_writer(path), third)
        assert set(contents(path)) == {MANIFEST, CONFIG, ADAPTER}, "the next one who saves tidies up"
    assert ends > 8
    assert seen == {"joint", "kv-packet"}


def _ending(patched: pytest.MonkeyPatch, operations: list[tuple[Any, str]], at: int) -> list[int]:
    """End the process, so to speak, at the operation of that number."""
    count = [0]

    def ended(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] > at:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return call

    for home, name in operations:
        patched.setattr(home, name, ended(getattr(home, name)))
    return count


def test_a_full_disk_leaves_the_old_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = random_writer(tiny(), "joint", seed=1)
    old.save(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            random_writer(tiny(), "joint", seed=2).save(tmp_path)
    assert equal(load_writer(tmp_path), old)


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{}\n")
    random_writer(tiny(), "joint").save(tmp_path)
    random_writer(tiny(), "sempic").save(tmp_path)
    assert set(contents(tmp_path)) == {"log.jsonl", MANIFEST, CONFIG, ADAPTER}
    assert load_writer(tmp_path).kind == "sempic"


def test_who_reads_while_another_saves_gets_the_old_or_the_new_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = random_writer(tiny(), "joint", seed=1), random_writer(tiny(), "sempic", seed=2)
    read = Path.read_bytes
    names = [MANIFEST, CONFIG, ADAPTER, SOFT_TOKENS]
    for name in names:  # before which the other process saves
        path, left = tmp_path / name, [name]
        old.save(path)

        def meanwhile(file: Path, path: Path = path, left: list[str] = left) -> bytes:
            if file.name in left and file.parent == path:
                left.clear()
                new.save(path)
            return read(file)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", meanwhile)
            found = load_writer(path)
        assert not left
        assert found.digest == new.digest


def test_who_reads_what_was_just_staged_gets_it_where_it_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = random_writer(tiny(), "sempic")
    with monkeypatch.context() as patched:
        patched.setattr(folder, "_publish", lambda path: None)
        writer.save(tmp_path)
    read, publish, left = Path.read_bytes, folder._publish, [ADAPTER]

    def meanwhile(file: Path) -> bytes:
        if file.name in left:
            left.clear()
            publish(tmp_path)
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", meanwhile)
    assert load_writer(tmp_path).digest == writer.digest
    assert not (tmp_path / ".staged").exists()


@pytest.mark.parametrize("files", [None, 7, "x", [], [1], {ADAPTER: None}, {ADAPTER: []}, {ADAPTER: {"bytes": 1}}])
def test_a_list_of_files_of_another_form(files: object, tmp_path: Path) -> None:
    random_writer(tiny(), "sempic").save(tmp_path)
    fields = json.loads((tmp_path / MANIFEST).read_bytes())
    del fields["checksum"]
    fields["files"] = files
    fields["checksum"] = folder._checksum(fields)
    (tmp_path / MANIFEST).write_text(json.dumps(fields))
    with pytest.raises(WriterError, match="does not list its files"):
        load_writer(tmp_path)
