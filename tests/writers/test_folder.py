"""A writer's folder is replaced as a whole, wherever saving ends, and leaves other files alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvquilt.writers.artefact import load_writer
from kvquilt.writers.folder import ADAPTER, CONFIG, MANIFEST
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
