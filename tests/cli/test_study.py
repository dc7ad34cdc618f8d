"""`kvquilt study`: hit rates without a model, attention on a tiny one."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.cli.conftest import Run

SMALL = ("--requests", 200, "--documents", "20,40", "--exponent", "0.8", "--mean-tokens", 40, "--capacity", "60MB")


def test_hit_rates_without_a_model(run: Run, tmp_path: Path) -> None:
    out, picture = tmp_path / "made" / "hit.json", tmp_path / "hit.png"
    done = run("study", "hit-rate", *SMALL, "--arms", "prefix,segments:store", "--json", out, "--plot", picture)
    assert done.code == 0, done.err
    assert "1 of 2 traces" in done.err
    assert "2 of 2 traces, 0:00 to go" in done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["documents", "prefix", "segments:store"]
    assert [line.split()[0] for line in lines[1:3]] == ["20", "40"]
    assert lines[-1].startswith("Share of all prompt tokens that need not be computed. A cache of 60MB (llama-3.1-8b, ")
    told = json.loads(out.read_text())
    assert {"command", "commit", "machine"} <= told.keys()
    assert str(tmp_path) not in told["command"]
    assert [row["capacity_tokens"] for row in told["rows"]] == [60_000_000 // 131072] * 2
    assert all(row["arms"][0]["token_hit_rate"] < row["arms"][1]["token_hit_rate"] for row in told["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = run("study", "hit-rate", *SMALL, "--arms", "prefix,segments:store", "--json", "-").json
    assert again["rows"] == told["rows"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--of", "llama"), "--of: "),
        (("--capacity", "thirty"), "--capacity: must be a number of bytes"),
        (("--capacity", "1"), "--capacity: must hold a token, which takes"),
        (("--capacity", "1MB"), "--capacity: must hold a document, the shortest has"),
        (("--exponent", "a"), "--exponent: must be numbers"),
        (("--exponent", "5"), "--exponent: must be a number from 0 to 4 (got 5.0)"),
        (("--documents", "0"), "--documents: must be an integer from 1"),
        (("--documents", "3"), "--per-request: must be an integer from 1 to 3"),
        (("--order", "shufled"), "--order: must be one of shuffled"),
        (("--arms", "segments:lur"), "lru"),
        (("--arms", ","), "--arms: name at least one"),
        (("--rate", "0"), "--rate: must be a finite number above 0"),
        (("--stamp-seconds", "nan"), "--stamp-seconds: must be a finite number above 0"),
        (("--bytes-per-token", str(10**9)), "--capacity: must hold a token"),
        (("--json", "/proc/none/x.json"), "--json: "),
        (("--plot", "/proc/none/x.png"), "--plot: "),
    ],
)
def test_what_cannot_be_simulated_is_told(run: Run, options: tuple[str, ...], named: str) -> None:
    done = run("study", "hit-rate", *SMALL, *options)
    assert done.code == 2
    assert named in done.err


@pytest.mark.usefixtures("model")
def test_a_trace_is_replayed_through_the_model(run: Run) -> None:
    found = run("study", "hit-rate", *SMALL, "--replay", 8, "--json", "-").json["replay"]
    assert found["model"] == "tiny"
    assert found["requests"] == 8
    assert found["points_apart"] < 1


@pytest.mark.usefixtures("model")
def test_attention_of_a_users_own_questions(run: Run, tmp_path: Path) -> None:
    names = ("with", "while", "assert", "if")
    rows = [
        {
            "documents": [{"id": name, "text": topics[name].strip()[:90]} for name in names[n::2]],
            "question": f"What does {names[n]} do?",
            "answers": ["It"],
        }
        for n in range(2)
    ]
    path, out = tmp_path / "own.jsonl", tmp_path / "study"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    asked = ("study", "attention", "--task", f"jsonl:{path},share=0", "--methods", "epic:k=2", "--out", out)
    done = run(*asked)
    assert done.code == 0, done.err
    assert "1 of 8 prompts" in done.err
    assert "8 of 8 prompts, 0:00 to go" in done.err
    table = [line.split()[:2] for line in done.out.splitlines()[:5]]
    assert table == [["method", "items"], ["full", "2"], ["full-again", "2"], ["none", "2"], ["epic:k=2", "2"]]
    assert json.loads((out / "attention.json").read_text())["about"]["task"] == "jsonl:own.jsonl,share=0"
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [arm["method"] for arm in run(*asked, "--json").json["arms"]] == ["full", "full-again", "none", "epic:k=2"]
    other = run(*asked[:-3], "none", "--out", out)
    assert other.code == 2
    assert "differs in methods" in other.err


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """Four questions over three documents each: two tune, two evaluate."""
    names = ("with", "while", "assert", "if", "pass", "break", "global", "del", "for", "try", "class", "return")
    rows = [
        {
            "documents": [{"id": name, "text": topics[name].strip()[:60]} for name in names[3 * n : 3 * n + 3]],
            "question": f"What is {names[3 * n]}?",
            "answers": ["It"],
            "gold": [n % 3],
        }
        for n in range(4)
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return f"jsonl:{path}"


@pytest.mark.usefixtures("model")
def test_a_repair_budget_part_by_part_in_one_folder(
    run: Run, tmp_path: Path, questions: str, model_folder: Path
) -> None:
    out = tmp_path / "study"
    asked = ("study", "repair-budget", "--task", questions, "--out", out, "--budget", "40%", "--limit", 2)
    asked += ("--tuning-limit", 2, "--seeds", 1, "--new-tokens", 3)
    first = run(*asked, "--part", "budget", "--arms", "fewer-documents:1")
    assert first.code == 0, first.err
    # two items under two references and eleven arms tune; how many evaluate is counted before anything is read, too
    assert "1 of 2 settings: budget/jsonl/tuning, 0 of " in first.err
    assert "2 of 2 settings: budget/jsonl/evaluation" in first.err
    assert first.err.rstrip().endswith("0:00 to go")
    assert "Token selector chosen on 2 items" in first.out
    assert "fewer-documents:1" in first.out
    told = run(*asked, "--part", "retrieval", "--dense", model_folder, "--json").json
    assert told["budget"][0]["of"] == "jsonl:own.jsonl"
    assert {"model", "command", "commit", "machine", "dtype"} <= told["about"].keys()
    assert str(tmp_path) not in json.dumps(told["about"])
    assert set(told["retrieval"][0]["hit@1"]) == {"attention mass", "attention density", "BM25", "dense"}
    assert json.loads((out / "repair-budget.json").read_text()) == told
    assert "## Retrieval" in (out / "repair-budget.md").read_text()
    assert (out / "budget.png").read_bytes().startswith(b"\x89PNG")
    page = run("report", out / "budget" / "jsonl" / "evaluation")
    assert page.code == 0, page.err
    other = run(*asked, "--part", "retrieval")
    assert other.code == 2
    assert "it differs in dense" in other.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--part", "structur"), "--part: must be one of structure"),
        (("--part", ","), "--part: name at least one"),
        (("--questions", "bio"), "--questions: must be one of biography"),
        (("--places", "left"), "--places: must be one of first"),
        (("--distractors", "0"), "--distractors: must be an integer from 1"),
        (("--task", "biografy"), "--task: unknown task; did you mean 'biography'"),
        (("--task", "biography", "--task", "biografy"), "--task: unknown task; did you mean 'biography'"),
        (("--task", "jsonl:OWN,share=0"), "--task: split: has nothing in it; name another file (tuning=PATH)"),
        (("--arms", "nine"), "--arms: unknown method 'nine'; did you mean 'none'"),
        (("--arms", "sempic"), "--writer: sempic needs a trained writer of that kind: give its folder, --writer PATH"),
        (("--budget", "much"), "--budget: "),
        (("--distractors", "one"), "--distractors: must be numbers"),
        (("--company", "I9"), "--company: must be one of I0, I1, I2, I3"),
    ],
)
def test_a_wrong_study_is_found_before_a_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, questions: str, options: tuple[str, ...], says: str
) -> None:
    options = tuple(each.replace("jsonl:OWN", questions) for each in options)
    monkeypatch.setenv("KVQUILT_MODEL", "no-model-of-this-name")
    done = run("study", "repair-budget", "--out", tmp_path / "study", *options)
    assert done.code == 2
    assert says in done.err
