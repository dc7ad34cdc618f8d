"""docs/results.md and README.md on runs and studies: what is kept of a folder, and what the pages make of it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvquilt.errors import InputError
from tests.evaluation.report.test_report import ARMS, folder

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ABOUT = {
    "task": "made-up", "split": "evaluation", "seed": 0, "score": "contains_em", "model": "tiny", "dtype": "float32",
    "command": "kvquilt eval --made-up", "commit": "0f", "torch": "2", "machine": "none", "threads": 2,
}  # fmt: skip
SINGLE = "first token, single readings"


def script(name: str) -> ModuleType:
    """A module of scripts/, found as when it is run."""
    path = sys.path.copy()
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = path


evaluation, studies, keep, gen_docs = map(
    script, ("evaluation_measured", "studies_measured", "keep_result", "gen_docs")
)


def kept(results: Path, name: str, low: float | None, **about: str) -> dict[str, Any]:
    """A run of 3 items on two of which reuse fails, kept; full prefill's lead over no context has this lower end."""
    keep.keep_evaluation(folder(results / f"run-{name}"), name, results)
    path = results / "eval" / f"{name}.json"
    (run,) = json.loads(path.read_text())
    run["about"] = {**ABOUT, **about}
    run["documents_help"] = None if low is None else {"value": 1.0, "low": low, "high": 1.0}
    path.write_text(json.dumps([run]))
    return dict(run)


def cells(lines: list[str]) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]


def test_without_files_there_is_nothing(tmp_path: Path) -> None:
    assert evaluation.evaluation_sections(tmp_path) == []
    assert evaluation.readme_table(tmp_path) == []
    assert studies.study_sections(tmp_path) == []


def test_every_committed_file_is_on_the_page() -> None:
    """And has beside it the figures that the page points at."""
    text = "\n".join(evaluation.evaluation_sections() + studies.study_sections())
    runs = list((RESULTS / "eval").glob("*.json"))
    files = [path for kind in ("hit-rate*", "attention-*", "repair-budget-*") for path in RESULTS.glob(f"{kind}.json")]
    assert len(files) >= 3
    told = [run["about"]["command"] for path in runs for run in json.loads(path.read_text())]
    read = [json.loads(path.read_text()) for path in files]
    for command in (*told, *(each.get("about", each)["command"] for each in read)):
        assert f"`{command}`" in text
    assert [path.name for path in runs if not path.with_suffix(".md").exists()] == []
    assert [path.name for path in (*runs, *files) if path.stat().st_size > keep.LARGEST] == []


def test_what_is_kept_of_a_run_holds_no_text_of_its_items(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    written = keep.keep_evaluation(run, "own-tiny", tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in written] == ["eval/own-tiny.json", "eval/own-tiny.md"]
    for path in written:
        assert "evil" not in path.read_text()
        assert ARMS[2] in path.read_text()
    assert not (run / "report.html").exists(), "the run's own folder is left as it was"


def test_a_run_that_goes_on_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not finished: 2 of 3 items"):
        keep.keep_evaluation(folder(tmp_path / "run", lines=len(ARMS) * 2 + 1), "own-tiny", tmp_path)
    assert not (tmp_path / "eval").exists()


def test_where_documents_help_scores_stand_behind_fidelity(tmp_path: Path) -> None:
    kept(tmp_path, "made-tiny", low=0.25)
    lines = evaluation.evaluation_sections(tmp_path)
    at = lines.index("### `made-up`")
    assert lines[at + 2] == "tiny: the documents help: full prefill scores 1.000 [0.250, 1.000] above no context."
    assert "3 items, split `evaluation`, seed 0, float32, 2 threads" in lines[at + 4]
    assert "`kvquilt eval --made-up` [All figures](../benchmarks/results/eval/made-tiny.md)." in lines[at + 4]
    head, _, *found = cells(lines)
    assert head == ["arm", "n", "KL to full", "KL recovered", "contains_em", "damage", SINGLE, "charged"]
    assert found[0][:6] == ["`full`", "3", "-", "-", "1.000 [1.000, 1.000]", "0.0% [0.0%, 0.0%]"]
    assert found[3] == [
        "`epic:k=2`", "3", "0.500 [0.500, 0.500]", "0.0%", "0.667 [0.000, 1.000]", "33.3% [0.0%, 100.0%]",
        "0.25", "5.0%",
    ]  # fmt: skip
    assert found[-1][:4] == ["`full-again` (noise floor)", "3", "0.000 [0.000, 0.000]", "100.0%"]
    assert lines[-1] == (
        "Damage: of the 3 items that full prefill gets right and no context wrong. Fewer than 30 carry no claim."
    )


@pytest.mark.parametrize(("low", "said"), [(0.0, "do not clearly help"), (None, "was not measured")])
def test_where_they_do_not_no_score_is_shown(tmp_path: Path, low: float | None, said: str) -> None:
    run = kept(tmp_path, "made-tiny", low)
    run["refused"] = {"epic:k=9": "it is not full prefill with everything computed"}
    run["arms"][3]["refused"] = 1
    (tmp_path / "eval" / "made-tiny.json").write_text(json.dumps([run]))
    lines = evaluation.evaluation_sections(tmp_path)
    assert said in lines[lines.index("### `made-up`") + 2]
    head, _, *found = cells(lines)
    assert head == ["arm", "n", "KL to full", "KL recovered", SINGLE, "charged"]
    assert found[0] == ["`full`", "3", "-", "-", "1.00", "0.0%"]
    assert found[3] == ["`epic:k=2`", "3 (1 refused)", "0.500 [0.500, 0.500]", "0.0%", "0.25", "5.0%"]
    assert lines[-1] == "\nNot measured: `epic:k=9`: it is not full prefill with everything computed."
    _, _, *brief = cells(evaluation.readme_table(tmp_path))
    assert brief == [["`full`", "-"], *([f"`{arm}`", "KL 0.500"] for arm in ARMS[1:5])]


def test_times_are_measured_ones_for_all_arms_of_a_run_or_for_none(tmp_path: Path) -> None:
    run = kept(tmp_path, "made-tiny", low=0.0)
    timed = {"ratio": 0.4, "low": 0.25, "high": 0.5}
    run["prefix_hit"] = timed
    for n, arm in enumerate(run["arms"]):
        arm["work"]["timed"] = timed if n < 3 else None
    run["arms"][-1]["work"] = None
    (tmp_path / "eval" / "made-tiny.json").write_text(json.dumps([run]))
    head, _, *found = cells(evaluation.evaluation_sections(tmp_path))
    assert head[4] == "first token"
    assert [row[4] for row in found] == ["0.400 [0.250, 0.500]"] * 3 + ["-"] * (len(found) - 3)


def test_models_of_a_task_stand_together_and_tasks_across_in_the_readme(tmp_path: Path) -> None:
    kept(tmp_path, "a", low=0.25)
    kept(tmp_path, "b", low=0.25, task="other")
    run = kept(tmp_path, "c", low=0.0, model="small")
    run["arms"] = [*run["arms"][:3], {**run["arms"][3], "method": "deranged:epic:k=2"}]
    (tmp_path / "eval" / "c.json").write_text(json.dumps([run]))
    lines = evaluation.evaluation_sections(tmp_path)
    began = [line.partition(":")[0] for line in lines if line.startswith(("### ", "tiny: ", "small: "))]
    assert began == ["### `made-up`", "tiny", "small", "### `other`", "tiny"]
    head, _, *found = cells(evaluation.readme_table(tmp_path))
    assert head == ["arm", "`made-up, tiny, float32` (contains_em, n = 3)", "`other` (contains_em, n = 3)",
                    "`made-up, small, float32` (contains_em, n = 3)"]  # fmt: skip
    assert found == [
        ["`full`", "1.000", "1.000", "-"],
        ["`no-context`", "0.000, KL 0.500", "0.000, KL 0.500", "KL 0.500"],
        ["`none`", "0.000, KL 0.500", "0.000, KL 0.500", "KL 0.500"],
        ["`epic:k=2`", "0.667, KL 0.500", "0.667, KL 0.500", "-"],
        ["`fewer-documents:1`", "0.000, KL 0.500", "0.000, KL 0.500", "-"],
    ]


def test_a_task_is_named_with_its_options_where_another_has_its_name(tmp_path: Path) -> None:
    for name, task in (("a", "niah:kind=single"), ("b", "niah:kind=multikey"), ("c", "squad:somewhere.json")):
        kept(tmp_path, name, low=0.25, task=task)
    head = cells(evaluation.readme_table(tmp_path))[0]
    assert [each.partition(" (")[0] for each in head[1:]] == ["`niah:kind=single`", "`niah:kind=multikey`", "`squad`"]


def test_hit_rates_have_a_row_for_a_trace_and_a_column_for_an_arm(tmp_path: Path) -> None:
    def row(documents: int, **rates: float) -> dict[str, Any]:
        arms = [{"arm": arm, "token_hit_rate": rate} for arm, rate in rates.items()]
        about = {"exponent": 0.6, "documents": documents, "per_request": 5, "order": "stable"}
        return {**about, "capacity_bytes": 1_500_000_000, "arms": arms}

    found = {
        **ABOUT, "of": {"name": "big"}, "bytes_per_token": 100,
        "traffic": {"requests": 9, "stamp_seconds": 1, "seed": 3},
        "rows": [row(10, prefix=0.125, segments=0.5), row(20, segments=0.25)],
    }  # fmt: skip
    replay = {"model": "tiny", "requests": 4, "prompt_tokens": 80, "real": 0.5, "simulated": 0.25, "evictions": 2}
    (tmp_path / "hit-rate-other.json").write_text(json.dumps({**found, "replay": {**replay, "real_evictions": 3}}))
    (tmp_path / "hit-rate.json").write_text(json.dumps(found))
    lines = studies.study_sections(tmp_path)
    head, _, *rows = cells(lines)
    assert head == ["documents", "exponent", "in a prompt", "memory", "`prefix`", "`segments`"]
    assert rows[:2] == [["10", "0.6", "5", "1.5 GB", "12.5%", "50.0%"], ["20", "0.6", "5", "1.5 GB", "-", "25.0%"]]
    assert lines[-1] == (
        "The same through a real model (tiny, 4 requests, 80 tokens): 50.00% of the tokens and 3 evictions; in the "
        "simulator 25.00% and 2."
    )
    assert len([line for line in lines if "9 requests, documents in stable order" in line]) == 2


ATTENTION = {
    "about": ABOUT,
    "refused": {"cacheblend": "a control failed"},
    "arms": [
        {
            "method": "epic", "items": 2, "refused": 1, "ratio": {"raw": {"front": 0.5, "interior": None}},
            "density": [2.0, 1.0, None, 0.5], "nrmse": 0.125, "cosine": 0.25, "mass": 0.0625, "seen": 0.5,
            "heads": {"distance": [[0.5, 1.0], [None, 3.0], [None, None]],
                      "nrmse": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]},
            "places": [[0.25] * 20] * 3,
        }
    ],
}  # fmt: skip


def test_attention_is_told_by_arm_and_what_is_unknown_is_a_dash(tmp_path: Path) -> None:
    (tmp_path / "attention-made-tiny.json").write_text(json.dumps(ATTENTION))
    lines = studies.study_sections(tmp_path)
    assert cells(lines)[2] == ["`epic`", "2 (1 refused)", "0.5", "-", "2", "0.75", "0.125", "0.25", "0.0625", "50%"]
    assert lines[-1] == "\nNot measured: `cacheblend`: a control failed."
    (tmp_path / "attention-made-tiny.json").write_text(json.dumps(keep.by_layer(ATTENTION)))
    assert studies.study_sections(tmp_path) == lines, "the page needs no heads"


def test_too_many_heads_are_kept_as_means_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Told:
        def as_dict(self) -> dict[str, Any]:
            return ATTENTION

    monkeypatch.setattr(keep, "summarise_attention", lambda _: Told())
    (tmp_path / "study").mkdir()
    items = tmp_path / "study" / "items.jsonl"
    items.write_text("{}\n" * 4)
    with pytest.raises(InputError, match="not finished: epic has not all 4 items"):
        keep.keep_attention(tmp_path / "study", "made-tiny", tmp_path)
    items.write_text("{}\n" * 3)
    whole = len(json.dumps(ATTENTION)) + 1
    for largest, expected in ((whole, ATTENTION), (whole - 1, keep.by_layer(ATTENTION))):
        monkeypatch.setattr(keep, "LARGEST", largest)
        (path,) = keep.keep_attention(tmp_path / "study", "made-tiny", tmp_path)
        assert path == tmp_path / "attention-made-tiny.json"
        assert json.loads(path.read_text()) == expected
    (thin,) = keep.by_layer(ATTENTION)["arms"]
    assert thin["layers"] == {"distance": [0.75, 3.0, None], "nrmse": [1.5, 3.5, 5.5]}
    assert "heads" not in thin
    monkeypatch.setattr(keep, "LARGEST", 10)
    with pytest.raises(InputError, match="take more than 10 bytes"):
        keep.keep_attention(tmp_path / "study", "made-tiny", tmp_path)


@pytest.mark.parametrize("unfinished", [[], ["structure/biography/I0"]])
def test_a_study_of_the_repair_budget_is_kept_whole(
    unfinished: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"retrieval": [], "unfinished": unfinished}
    monkeypatch.setattr(keep, "figures", lambda _: found)
    if unfinished:
        with pytest.raises(InputError, match="not finished: structure/biography/I0"):
            keep.keep_repair_budget(tmp_path, "made-tiny", tmp_path)
    else:
        (path,) = keep.keep_repair_budget(tmp_path, "made-tiny", tmp_path)
        assert path == tmp_path / "repair-budget-made-tiny.json"
        assert json.loads(path.read_text()) == found


def test_the_readme_is_written_between_its_marks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gen_docs, "ROOT", tmp_path)
    monkeypatch.setattr(gen_docs, "readme_table", list)
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{gen_docs.BEGIN}\nold\n{gen_docs.END}\nafter\n")
    assert gen_docs.readme_page() == f"before\n{gen_docs.BEGIN}\n{gen_docs.END}\nafter\n"
    monkeypatch.setattr(gen_docs, "readme_table", lambda: ["## New"])
    made = f"before\n{gen_docs.BEGIN}\n\n## New\n\n{gen_docs.END}\nafter\n"
    assert gen_docs.readme_page() == made
    readme.write_text(made)
    assert gen_docs.readme_page() == made
    readme.write_text("without marks\n")
    with pytest.raises(SystemExit, match=r"README\.md: .* must stand there"):
        gen_docs.readme_page()


def test_a_folder_that_is_damaged_or_none_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder(tmp_path / "run")
    (run / "lines.jsonl").write_text("no line\n")
    for kind in ("eval", "attention"):
        assert keep.main([kind, str(tmp_path / "none"), "x-y"]) == 1
        assert keep.main([kind, str(run), "x-y"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    assert "line 1 is damaged" in said[1]
