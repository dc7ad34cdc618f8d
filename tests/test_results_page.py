"""docs/results.md on trained writers: every file of a kind, whatever rows it has, and only what it says."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORIGIN = {"command": "made.py --up", "commit": "0f", "torch": "2", "machine": "none", "threads": 1, "model": "made-up"}
KINDS = ("writer-quality", "writer-domains", "writer-study", "training-memory", "training-speed")


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The generator's module, found as when it is run."""
    path = sys.path.copy()
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("training_measured")
    finally:
        sys.path[:] = path


def rows(page: ModuleType, folder: Path, name: str, content: dict[str, Any]) -> list[list[str]]:
    """Cells of every line of every table, from this one file."""
    (folder / f"{name}.json").write_text(json.dumps({**ORIGIN, **content}), encoding="utf-8")
    lines = page.training_sections(folder)
    assert any("made-up" in line and "`made.py --up`" in line and "commit 0f" in line for line in lines)
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]


def test_without_results_there_is_no_section(page: ModuleType, tmp_path: Path) -> None:
    assert page.training_sections(tmp_path) == []


def test_every_committed_result_is_on_the_page(page: ModuleType) -> None:
    results = ROOT / "benchmarks" / "results"
    committed = [path for kind in KINDS for path in results.glob(f"{kind}-*.json")]
    text = "\n".join(page.training_sections())
    assert len(committed) >= 5
    for path in committed:
        assert f"`{json.loads(path.read_text(encoding='utf-8'))['command']}`" in text, path.name


def test_arms_stand_by_what_they_cost_and_what_was_not_measured_is_a_dash(page: ModuleType, tmp_path: Path) -> None:
    spent = {"mean_kl": 0.25, "kl_standard_error": None, "p95_kl": 1.0, "top1": 0.5, "first_token_ratio": 2.0}
    arms = {
        "epic:writer=new": {"n": 3, "micro_f1": 0.5, "recovery": None, "charged_share": 0.2, **spent},
        "full prefill of the best 1": {"n": 9, "micro_f1": 0.7},
        "new": {"n": 9, "micro_f1": 0.4, "recovery": 0.5, "charged_share": 0.0, **spent, "kl_standard_error": 0.125},
        "full": {"n": 9, "micro_f1": 0.6, "recovery": 1.0},
    }
    about = {"dtype": "float32", "documents": 5, "prompt_tokens": 400.0, "n": 9, "seed": 0, "bm25_hit": 1.0}
    _, _, *found = rows(page, tmp_path, "writer-quality-a", {**about, "arms": arms})
    assert [row[0] for row in found] == ["full", "full prefill of the best 1", "`new`", "`epic:writer=new`"]
    assert found[1][1:] == ["9", "0.700", *["-"] * 6]
    assert found[2][1:6] == ["9", "0.400", "0.50", "0.0%", "0.250 ± 0.125"]
    assert found[3][1:6] == ["3", "0.500", "-", "20.0%", "0.250"]


def test_seeds_of_a_setting_are_one_row_and_a_new_study_is_a_table(page: ModuleType, tmp_path: Path) -> None:
    def row(study: str, name: str, seed: int, f1: float, **more: Any) -> dict[str, Any]:
        return {
            "study": study,
            "name": name,
            "seed": seed,
            "samples": 8,
            "questions": 2,
            "f1": f1,
            "kl": f1 / 100,
            **more,
        }

    made = [row("main", "a", 0, 0.5), row("new", "b", 0, 0.25, top1=1, other=3), row("main", "a", 1, 0.7)]
    full = {"full": {"f1": 1.0}, "none": {"f1": 0.0, "kl": 8.0, "top1": 0.5}}
    found = rows(page, tmp_path, "writer-study-a", {"reader": "made-up", "n": 10, **full, "rows": made})
    assert ["none", "0.000", "8", "0.500"] in found
    assert ["a", "2", "8", "2", "0.600 (0.500 to 0.700)", "0.006 (0.005 to 0.007)", "-", "-"] in found
    assert ["b", "1", "8", "2", "0.250", "0.0025", "1.000", "-"] in found
    titles = [line for line in page.training_sections(tmp_path) if line.startswith("### ")]
    assert titles == ["### Study: main", "### Study: new"]


def test_a_writer_has_a_row_for_what_it_was_trained_on_and_a_column_for_what_it_reads(
    page: ModuleType, tmp_path: Path
) -> None:
    def cells(kl: float) -> dict[str, Any]:
        known = {"mean_kl": kl, "kl_standard_error": 0.01}
        return {"people": {**known, "micro_f1": 0.5}, "help": {**known, "micro_f1_to_full": 0.75}}

    full = {"people": {"micro_f1": 0.9, "answer_tokens": 4.0}, "help": {"answer_tokens": 9.0}}
    table = {"full": full, "none": cells(2.0), "sempic": {"people": cells(0.5), "help": cells(0.25)}}
    content = {"documents": 4, "sets": 96, "seed": 0, "n": {"people": 48, "help": 40}, "table": table}
    head, _, *found = rows(page, tmp_path, "writer-domains-a", content)
    assert head == ["arm", "trained on", "people, mean KL", "help, mean KL", "people, micro-F1", "help, micro-F1"]
    assert found == [
        ["full", "-", "-", "-", "0.900", "-"],
        ["`none`", "-", "2.000 ± 0.010", "2.000 ± 0.010", "0.500", "0.750 to full"],
        ["`sempic`", "people", "0.500 ± 0.010", "0.500 ± 0.010", "0.500", "0.750 to full"],
        ["`sempic`", "help", "0.250 ± 0.010", "0.250 ± 0.010", "0.500", "0.750 to full"],
    ]
    assert "n = 48 (people), 40 (help)" in "\n".join(page.training_sections(tmp_path))


def test_an_arm_of_memory_that_was_not_run_is_a_dash(page: ModuleType, tmp_path: Path) -> None:
    direct = {"batch": 1, "questions": 8, "direct": {"peak_mb": 468.5, "kept_mb": 400.0}}
    _, _, found = rows(page, tmp_path, "training-memory-a", {"documents": 5, "rows": [direct]})
    assert found == ["1", "8", "468 MB", "-", "-", "400 MB", "-", "-", "-"]


def test_stages_of_a_step_and_what_it_is_spent_on(page: ModuleType, tmp_path: Path) -> None:
    step = {"questions": 4, "document_tokens": 100, "gflop": 9.6, "writer_seconds": 1.25, "step_seconds": 3.0}
    shares = {"aten::mm": 0.75, "aten::mul": 0.0625}
    content = {"documents": 5, "rounds": 2, "rows": [step], "share_of_time_with_4_questions": shares}
    _, _, found = rows(page, tmp_path, "training-speed-a", content)
    assert found[:5] == ["4", "100", "-", "10", "1.25 s"]
    assert found[8:] == ["3.00 s", "-", "-", "-"]
    assert "Of the time with 4 questions: `aten::mm` 75.0%, `aten::mul` 6.2%." in page.training_sections(tmp_path)
