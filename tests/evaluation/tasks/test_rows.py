"""What a path or a data set gives. The package `datasets` is played by one of our own, and tried where it is."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.rows import check_rows, read_rows

ROWS = [{"question": "Ä?"}, {"question": "B?"}]
FORM = "must be a list of questions"


def test_json_and_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")
    for name in ("rows.jsonl", "rows.NDJSON"):
        (tmp_path / name).write_text("\n\n".join(map(json.dumps, ROWS)) + "\n", encoding="utf-8")
        assert read_rows(tmp_path / name, FORM) == ROWS
    assert read_rows(str(tmp_path / "rows.json"), FORM) == ROWS


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": 1}\n{"question"\n', encoding="utf-8")
    with pytest.raises(InputError, match=f"path: line 2: {FORM} .got 'no JSON'"):
        read_rows(path, FORM)
    with pytest.raises(InputError, match="must be a file that can be read: No such file"):
        read_rows(tmp_path / "nothing.json", FORM)
    for rows in ([], {}, "text", None):
        with pytest.raises(InputError, match=FORM):
            check_rows(rows, FORM)


def test_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("[1]", encoding="utf-8")
    assert read_rows(path, FORM, hashlib.sha256(b"[1]").hexdigest()) == [1]
    with pytest.raises(InputError, match="must have the SHA-256 digest 00"):
        read_rows(path, FORM, "00")
    with pytest.raises(InputError, match="sha256: is of a file"):
        read_rows("hf:someone/rows", FORM, "00")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of a package of our own: one data set with a split, one with two, none else."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str | None) -> Any:
        asked.append((name, config, split))
        held = {"someone/one": {"train": ROWS}, "someone/two": {"train": ROWS, "validation": ROWS[:1]}}
        if name not in held:
            raise FileNotFoundError(f"no data set {name}\nand more")
        return held[name][split] if split else held[name]

    package = ModuleType("datasets")
    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    return asked


def test_data_sets_by_name(asked: list[tuple[Any, ...]]) -> None:
    assert read_rows("hf:someone/one", FORM) == ROWS
    assert read_rows("hf:someone/two:validation", FORM) == ROWS[:1]
    assert read_rows("hf:someone/two:english/train", FORM) == ROWS
    assert asked == [
        ("someone/one", None, None),
        ("someone/two", None, "validation"),
        ("someone/two", "english", "train"),
    ]
    with pytest.raises(InputError, match="must name a split, someone/two:SPLIT; it has train, validation"):
        read_rows("hf:someone/two", FORM)
    with pytest.raises(InputError, match=r"can be loaded: no data set someone/three \(got"):
        read_rows("hf:someone/three", FORM)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'kvquilt\[datasets\]'"):
        read_rows("hf:someone/one", FORM)


@pytest.mark.skipif(find_spec("datasets") is None, reason="the package datasets is not installed")
def test_a_folder_through_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    assert read_rows(f"hf:{folder}", FORM) == ROWS
    assert read_rows(f"hf:{folder}:train", FORM) == ROWS
    with pytest.raises(InputError, match="can be loaded"):
        read_rows(f"hf:{folder}:validation", FORM)
