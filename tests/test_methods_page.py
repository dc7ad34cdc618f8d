"""docs/methods.md: complete, filled by results alone, and true about names, options and commands."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from kvquilt.cli.app import app
from kvquilt.repair.presets import METHODS, find_method

ROOT = Path(__file__).resolve().parent.parent
PAGE, README = ROOT / "docs" / "methods.md", ROOT / "README.md"
ORIGIN = {"model": "made-up", "threads": 1, "machine": "none", "commit": "0", "seed": 0, "split": "test"}


@pytest.fixture(scope="module")
def scripts() -> dict[str, ModuleType]:
    """The generator's modules, found as when one of them is run."""
    path = sys.path.copy()
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return {name: importlib.import_module(name) for name in ("methods_page", "methods_measured", "methods_picture")}
    finally:
        sys.path[:] = path


def arm(kl: float, charged: float, f1: float = 0.5, error: float | None = 0.01) -> dict[str, Any]:
    return {
        "n": 7, "refused": 0, "micro_f1": f1, "first_token_ratio": 3.21, "mean_kl": kl, "kl_standard_error": error,
        "p95_kl": 1.0, "top1": 0.75, "charged_share": charged, "nominal_share": charged,
    }  # fmt: skip


def results(folder: Path, arms: dict[str, Any], times: dict[str, Any] | None = None) -> Path:
    full = {"n": 7, "refused": 0, "micro_f1": 0.64, "first_token_ratio": 1.0}
    cells = {"10-short": {"n": 7, "prompt_tokens": 400, "bm25_hit": 1.0, "arms": {"full": full, **arms}}}
    (folder / "repair-quality-made-up.json").write_text(json.dumps({**ORIGIN, "cells": cells}))
    if times is not None:
        run = {**ORIGIN, "tokens": 4096, "documents": 16, "rounds": 3, "dtype": "torch.bfloat16", **times}
        (folder / "repair-speed-made-up.json").write_text(json.dumps(run))
    return folder


def section(page: str, method: str) -> str:
    return page.partition(f"\n### {method}\n")[2].partition("\n### ")[0]


def test_without_results_every_method_says_that_it_was_not_measured(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    page = scripts["methods_page"].methods_page("", tmp_path)
    for name in METHODS:
        text = section(page, name)
        assert text.count("Not measured yet") == 1, name
        assert "**Paper.**" in text, name
        assert text.count("**Settings.**") == 1, name
    assert "methods.svg" not in page
    assert "{{" not in page
    assert not scripts["methods_picture"].draw_methods(tmp_path, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_results_fill_the_rows_of_their_methods_and_no_others(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    refused = {"n": 0, "refused": 7}
    arms = {"random:15%": arm(0.9, 0.149), "random:15%,writer=isolated": arm(0.8, 0.15), "cacheblend:5%": refused}
    few = {"n": 7, "refused": 0, "micro_f1": 0.41, "first_token_ratio": 4.0}
    times = {"arms": {"random:15%": {"full_over_method": 5.55, "charged_share": 0.15}}, "refused": {"epic:2%": "no"}}
    page = scripts["methods_page"].methods_page(
        "", results(tmp_path, arms | {"full prefill of the best 2": few}, times)
    )
    assert "`random:15%` | 7 | 14.9% | 14.9% | 0.50 (0.64) | 0.90 ± 0.01 | 0.75 | 3.2x" in section(page, "random")
    assert "`random:15%,writer=isolated`" in section(page, "random")
    assert "5.55x" in section(page, "random")
    assert "does not pay" in section(page, "cacheblend")
    assert "Not measured" in section(page, "cacheblend-gradual")
    assert "refused: no" in section(page, "epic")
    assert "full prefill of the best 2 | 7 | - | - | 0.41 (0.64)" in section(page, "full")
    assert "methods.svg" in page
    for line in page.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_tables_have_as_many_cells_in_every_row(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    arms = {"random:15%": arm(0.9, 0.149), "cacheblend:5%": {"n": 0, "refused": 7}}
    times = {"arms": {"random:15%": {"full_over_method": 5.55}}, "refused": {"random:2%": "no"}}
    width = None
    for line in scripts["methods_page"].methods_page("", results(tmp_path, arms, times)).splitlines():
        cells = line.count("|") if line.startswith("|") else None
        assert width is None or cells is None or cells == width, line
        width = cells


def test_the_closest_is_named_with_what_cannot_be_told_from_it(scripts: dict[str, ModuleType]) -> None:
    arms = {
        "full": {"n": 7, "refused": 0, "micro_f1": 0.64, "first_token_ratio": 1.0},
        "random:5%": arm(0.5, 0.05),
        "epic:k=16": arm(0.3, 0.04),
        "spread:5%": arm(0.31, 0.05),
        "prophetkv:15%": arm(0.1, 0.15),
        "a3:5%": arm(0.01, 0.05) | {"refused": 3},
    }
    cells = {"10-short": {"n": 7, "prompt_tokens": 400, "arms": arms}}
    lines = scripts["methods_measured"].which([{**ORIGIN, "cells": cells}])
    assert "| 5% | `epic:k=16` | 4.0% | 0.30 ± 0.01 | 0.50 | `spread:5%` | 0.50 ± 0.01 at 5.0% |" in lines
    assert any(line.startswith("| 15% | `prophetkv:15%` |") for line in lines), "it costs too much for the first row"
    assert "Highest micro-F1: `epic:k=16`, 0.50. Full prefill: 0.64." in lines, "of equals the cheapest"
    assert not any("a3" in line for line in lines), "figures over other prompts than the others' are not compared"


@given(st.floats(0, 3), st.floats(0, 3), st.floats(0.001, 1))
def test_what_lies_within_two_standard_errors_is_not_told_apart(
    scripts: dict[str, ModuleType], first: float, second: float, error: float
) -> None:
    together = scripts["methods_measured"]._together
    apart = abs(first - second) > 2 * (2 * error**2) ** 0.5
    one, other = arm(first, 0.1, error=error), arm(second, 0.1, error=error)
    assert together(one, other) == (not apart) == together(other, one)


def test_a_line_of_the_picture_is_one_method_through_its_budgets(scripts: dict[str, ModuleType]) -> None:
    arms = {
        "full": {"micro_f1": 0.6, "first_token_ratio": 1.0},
        "full prefill of the best 1": {"micro_f1": 0.6, "first_token_ratio": 9.0},
        "epic:k=4096,30%": arm(0.1, 0.3),
        "epic:k=16": arm(0.2, 0.05),
        "random:5%": arm(0.0, 0.05),
        "random:5%,writer=isolated": arm(2.0, 0.05),
        "cacheblend:5%": {"n": 0, "refused": 7},
    }
    lines = scripts["methods_picture"].lines_of(arms)
    assert list(lines) == ["epic", "random"]
    assert [charged for charged, _, _ in lines["epic"]] == pytest.approx([5, 30])
    assert lines["random"] == [(5.0, 3.21, 1.0)]


def test_the_same_results_give_the_same_picture(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    folder = results(tmp_path, {"none": arm(1.0, 0.0), "random:5%": arm(0.5, 0.05), "random:15%": arm(0.4, 0.15)})
    for name in ("a.svg", "b.svg"):
        assert scripts["methods_picture"].draw_methods(folder, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.svg").stat().st_size < 200_000


def test_a_method_without_prose_is_an_error(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prose = tmp_path / "methods.in.md"
    prose.write_text(scripts["methods_page"].PROSE.read_text(encoding="utf-8").replace("\n### epic\n", "\n### epik\n"))
    monkeypatch.setattr(scripts["methods_page"], "PROSE", prose)
    with pytest.raises(ValueError, match="epic, epik"):
        scripts["methods_page"].methods_page("", tmp_path)


@pytest.mark.parametrize("page", [PAGE, README], ids=lambda path: path.name)
def test_methods_that_the_page_writes_are_methods(page: Path) -> None:
    names = "|".join(sorted(METHODS, key=len, reverse=True))
    written = re.findall(rf"(?<![\w-])(?:{names}):[\w.%=,+-]*[\w%]", page.read_text(encoding="utf-8"))
    assert written or page == README
    for each in written:
        assert find_method(each).reuses, each


@pytest.mark.parametrize("page", [PAGE, README], ids=lambda path: path.name)
def test_commands_that_the_page_shows_have_these_flags(page: Path) -> None:
    shown = re.findall(r"(?:^|`)kvquilt ([a-z][^\n`#|]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    for written in shown:
        command: Any = typer.main.get_command(app)
        for word in written.split():
            if not hasattr(command, "commands"):
                break
            assert word in command.commands, f"kvquilt {written}"
            command = command.commands[word]
        flags = {flag for each in command.params for flag in each.opts}
        assert set(re.findall(r"--[a-z-]+", written)) <= flags, f"kvquilt {written}"
    assert len(shown) > 3, "nothing was found, so nothing was tested"
