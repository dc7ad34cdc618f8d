"""Benchmarks of the server end with 1 where what they must find is not so; their results are written all the same."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

GOOD: dict[str, Any] = {
    "server_load": {
        "load": {"errors": 0, "memory_last_fifth_over_second": 1.01},
        "at_the_end": {
            "cache_bytes": 0.0, 'store_pinned{tier="disk"}': 0.0, 'store_bytes{tenant="",tier="disk"}': 8.0,
            'store_bytes{tenant="",tier="memory"}': 5.0, "bytes_listed_on_disk": 8, "exit_status": 0,
        },
    },
    "server_reuse": {
        "hit_rate": {"50_to_150": 0.8, "last_100": 0.9}, "keys": {"stored": 8, "distinct_documents": 7},
        "exit_status": 0,
    },
    "server_fuzz": {
        "written": {"large": "413, in chunks 413", "slow": "others 200 after 0.05 s; they ['408'] after 500 s"},
        "generated": {"server_errors": []}, "plain_request_behind": 200, "unexpected_in_log": [], "exit_status": 0,
    },
    "server_faults": {
        "killed_in_load": {"cut_off": 3, "answers": {"equal": 5, "refused": 3, "wrong": 0}, "lost_segments": 0},
        "full_disk": {"skipped": "may not mount"},
        "valkey_restarts": {"answers": {"there": {"equal": 8, "refused": 0, "wrong": 0}}, "metrics": {"x": 3.0}},
        "corrupted": {"damaged": 4, "noticed": 4.0, "answers": {"equal": 8, "refused": 0, "wrong": 0}},
    },
}  # fmt: skip
BAD: list[tuple[str, list[str], Any]] = [
    ("server_load", ["load", "errors"], 1),
    ("server_load", ["load", "memory_last_fifth_over_second"], 1.06),
    ("server_load", ["at_the_end", "cache_bytes"], 64.0),
    ("server_load", ["at_the_end", 'store_pinned{tier="disk"}'], 1.0),
    ("server_load", ["at_the_end", "bytes_listed_on_disk"], 7),
    ("server_load", ["at_the_end", "exit_status"], -9),
    ("server_reuse", ["hit_rate", "last_100"], 0.7),
    ("server_reuse", ["keys", "stored"], 9),
    ("server_reuse", ["keys", "stored"], 6),
    ("server_fuzz", ["written", "large"], "413, in chunks 500"),
    ("server_fuzz", ["written", "slow"], "others 408 after 60.00 s; they ['408', '408'] after 61 s"),
    ("server_fuzz", ["generated", "server_errors"], ["POST /v1/completions: 500"]),
    ("server_fuzz", ["plain_request_behind"], 503),
    ("server_fuzz", ["unexpected_in_log"], ["Traceback"]),
    ("server_faults", ["killed_in_load", "lost_segments"], 1),
    ("server_faults", ["valkey_restarts", "answers", "there", "wrong"], 1),
    ("server_faults", ["corrupted", "answers", "wrong"], 1),
    ("server_faults", ["full_disk"], {"damaged_segments": 2}),
]


@pytest.mark.parametrize("name", GOOD)
def test_a_run_as_it_must_be_ends_well(name: str, tmp_path: Path) -> None:
    finish, bars = importlib.import_module("serving").finish, importlib.import_module(name).bars(GOOD[name])
    finish(GOOD[name], tmp_path / "out.json", bars)
    assert len(bars) > 2
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == GOOD[name]


@pytest.mark.parametrize(("name", "place", "value"), BAD)
def test_every_missed_bar_is_said_behind_the_result(name: str, place: list[str], value: Any, tmp_path: Path) -> None:
    result = copy.deepcopy(GOOD[name])
    inner = result
    for each in place[:-1]:
        inner = inner[each]
    inner[place[-1]] = value
    with pytest.raises(SystemExit, match="missed: ") as caught:
        importlib.import_module("serving").finish(
            result, tmp_path / "out.json", importlib.import_module(name).bars(result)
        )
    assert caught.value.code not in (0, None)
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == result


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ('cache_bytes{model_name="a"}', "cache_bytes"),
        ('store_bytes{model_name="a",tenant="",tier="disk"}', 'store_bytes{tenant="",tier="disk"}'),
        ('fallback_total{kind="x",model_name="a"}', 'fallback_total{kind="x"}'),
        ("up", "up"),
    ],
)
def test_samples_are_called_without_the_model(sample: str, expected: str) -> None:
    assert importlib.import_module("serving").plain(sample) == expected
