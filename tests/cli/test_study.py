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
    lines = done.out.splitlines()
    assert lines[0].split() == ["documents", "prefix", "segments:store"]
    assert [line.split()[0] for line in lines[1:]] == ["20", "40"]
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
        (("--of", "llama"), "of: "),
        (("--capacity", "thirty"), "capacity"),
        (("--exponent", "a"), "exponent"),
        (("--order", "shufled"), "shuffled"),
        (("--arms", "segments:lur"), "lru"),
        (("--capacity", "1MB"), "shortest has"),
        (("--json", "/proc/none/x.json"), "--json"),
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
    table = [line.split()[:2] for line in done.out.splitlines()[:5]]
    assert table == [["method", "items"], ["full", "2"], ["full-again", "2"], ["none", "2"], ["epic:k=2", "2"]]
    assert json.loads((out / "attention.json").read_text())["about"]["task"] == "jsonl:own.jsonl,share=0"
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [arm["method"] for arm in run(*asked, "--json").json["arms"]] == ["full", "full-again", "none", "epic:k=2"]
    other = run(*asked[:-3], "none", "--out", out)
    assert other.code == 2
    assert "differs in methods" in other.err
