"""Files that are written whole: who may read them, and what a failure leaves."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvquilt import files
from kvquilt.cli.ask import LAST_ANSWER, _remember
from kvquilt.errors import InputError, StoreUnavailableError
from kvquilt.evaluation.run.folder import EvaluationFolder
from kvquilt.files import add_line, held, write_atomically
from kvquilt.ledger import Ledger
from kvquilt.training.folder import RunFolder
from kvquilt.writers.folder import save_folder

_ALONE = """
import os, sys
from pathlib import Path
from kvquilt.files import write_atomically
os.umask(int(sys.argv[1], 8))
write_atomically(Path(sys.argv[2]), b"new", private=sys.argv[3] == "private")
assert os.umask(0) == int(sys.argv[1], 8)
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("umask", "ordinary", "private"),
    [("022", 0o644, 0o600), ("002", 0o664, 0o600), ("077", 0o600, 0o600), ("000", 0o666, 0o600)],
)
def test_a_file_has_the_mode_that_the_umask_gives(tmp_path: Path, umask: str, ordinary: int, private: int) -> None:
    """In a process of its own: a umask belongs to a whole process."""
    for kind, expected in (("ordinary", ordinary), ("private", private)):
        subprocess.run([sys.executable, "-c", _ALONE, umask, str(tmp_path / kind), kind], check=True)
        assert mode(tmp_path / kind) == expected


@pytest.mark.parametrize("before", [0o600, 0o640, 0o666])
def test_a_file_keeps_the_mode_that_its_owner_gave_it(tmp_path: Path, before: int) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(b"old")
    path.chmod(before)
    write_atomically(path, b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", before)
    write_atomically(path, b"newer", private=True)
    assert (path.read_bytes(), mode(path)) == (b"newer", 0o600)


@pytest.mark.parametrize("stage", ["write", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(*((files.os, "fsync", full) if stage == "write" else (Path, "replace", full)))
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_handed_on_can_be_read_and_what_nobody_asked_for_cannot(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    ordinary = mode(tmp_path / "plain")
    save_folder(tmp_path / "writer", {"kind": "made"}, {"soft_tokens.safetensors": b"rows"})
    run = EvaluationFolder(tmp_path / "run")
    run.write({"run": {}, "about": {}, "controls": {}}, [{"item": "a"}], [{"item": "a"}])
    run.add({"item": "a"})
    log = RunFolder(tmp_path / "trained")
    log.path.mkdir()
    log.note({"step": 1})
    log.back_to(0)
    handed = [path for name in ("writer", "run", "trained") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert sorted(path.name for path in handed) == [
        "items.jsonl", "lines.jsonl", "log.jsonl", "run.json", "soft_tokens.safetensors", "texts.jsonl", "writer.json",
    ]  # fmt: skip
    assert {path.name for path in handed if mode(path) != ordinary} == set()

    _remember(tmp_path / "cache", Ledger(method="none"), [])
    assert json.loads((tmp_path / "cache" / LAST_ANSWER).read_text())["passages"] == []
    assert mode(tmp_path / "cache" / LAST_ANSWER) == 0o600


def test_a_folder_is_held_by_one_and_free_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    for _ in range(2):
        with held(folder, "out", "writes into"):
            with pytest.raises(InputError, match="another process writes into this folder") as error, _held(folder):
                raise AssertionError("both hold it")
            assert (error.value.field, error.value.got) == ("out", str(folder))


def test_a_file_system_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailableError, match="file cannot be written: "), _held(tmp_path / "file"):
        raise AssertionError("a file is no folder")
    with pytest.raises(StoreUnavailableError, match=r"new/log\.jsonl cannot be written: No such file"):
        add_line(tmp_path / "new" / "log.jsonl", {"step": 1})


def _held(folder: Path) -> AbstractContextManager[None]:
    return held(folder, "out", "writes into")
