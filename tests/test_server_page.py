"""docs/results.md on the server: what its benchmarks wrote, held to the bars, missed ones included."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORIGIN = {"command": "made.py", "commit": "0f", "machine": "none", "threads": 1, "model": "made-up", "dtype": "float32"}
LOAD = {
    "throughput": {"ratio": 3.5},
    "load": {
        "clients": 4, "minutes": 1.0, "answered": 9, "hung up": 1, "errors": 0, "memory_last_fifth_over_second": 1.01,
    },
    "at_the_end": {
        "cache_bytes": 0.0, 'store_pinned{tier="disk"}': 0.0, 'store_bytes{tenant="",tier="disk"}': 8.0,
        'store_bytes{tenant="",tier="memory"}': 5.0, "bytes_listed_on_disk": 8,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The generator's module, found as when it is run."""
    path = sys.path.copy()
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("server_measured")
    finally:
        sys.path[:] = path


def met(page: ModuleType, folder: Path, name: str, content: dict[str, Any]) -> list[str]:
    """The last cell of every row."""
    (folder / f"{name}.json").write_text(json.dumps({**ORIGIN, **content}), encoding="utf-8")
    lines = page.server_section(folder)
    assert any("commit 0f" in line for line in lines)
    return [line.strip("| ").split(" | ")[-1] for line in lines if line.startswith("| made-up")]


def test_without_results_there_is_no_section(page: ModuleType, tmp_path: Path) -> None:
    assert page.server_section(tmp_path) == []


def test_a_load_that_went_well_meets_every_bar(page: ModuleType, tmp_path: Path) -> None:
    assert met(page, tmp_path, "server-load-a", LOAD) == ["yes", "-", "yes", "yes", "yes", "yes"]


@pytest.mark.parametrize(
    ("part", "field", "value", "row"),
    [
        ("throughput", "ratio", 2.9, 0),
        ("load", "errors", 1, 2),
        ("load", "memory_last_fifth_over_second", 1.06, 3),
        ("at_the_end", "cache_bytes", 64.0, 4),
        ("at_the_end", 'store_pinned{tier="disk"}', 1.0, 4),
        ("at_the_end", "bytes_listed_on_disk", 9, 5),
    ],
)
def test_what_misses_its_bar_is_said(
    page: ModuleType, tmp_path: Path, part: str, field: str, value: float, row: int
) -> None:
    changed = {**LOAD, part: {**LOAD[part], field: value}}  # type: ignore[dict-item]
    found = met(page, tmp_path, "server-load-a", changed)
    assert [place for place, each in enumerate(found) if each == "**no**"] == [row]


def test_a_wrong_answer_or_a_lost_segment_is_a_miss(page: ModuleType, tmp_path: Path) -> None:
    good = {"equal": 3, "refused": 1, "wrong": 0}
    faults = {
        "killed_in_load": {"answers": good, "lost_segments": 0},
        "killed_in_compile": {"answers": good, "damaged_segments": 1},
        "corrupted": {"answers": {**good, "wrong": 1}},
        "valkey_restarts": {"skipped": "no server here"},
    }
    assert met(page, tmp_path, "server-faults-a", faults) == ["**no**", "yes", "**no**"]
