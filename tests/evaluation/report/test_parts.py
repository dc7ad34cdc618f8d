"""What a report tells of times, kinds and groups in a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

from kvquilt.evaluation.report.told import read_told
from kvquilt.evaluation.run.timed_prompt import TimedPrompt, write_timing
from kvquilt.evaluation.run.timing import Timing
from tests.evaluation.report.test_report import ARMS, folder, report

ABOUT = {"machine": "x86 <b>", "device": "cpu", "dtype": "float32", "threads": 1, "load": [0.5, 1.5]}


def test_measured_times_are_told_as_such(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    html, markdown, figures = report(run)
    assert "time to first token (full prefill = 1), single readings" in html
    assert "First token: single readings" in markdown
    assert figures[0]["prefix_hit"] is None
    arms = {name: Timing((1.0 if "full" in name else 0.4,) * 5, (1.0,) * 5) for name in (*ARMS[1:], "prefix-hit")}
    arms["full"] = Timing((1.0,) * 5, (1.0,) * 5)
    write_timing(run, [TimedPrompt("item-1", 90, arms, {"none": 3.0}, ABOUT)])
    html, markdown, figures = report(run)
    assert "time to first token (full prefill = 1), measured" in html
    assert "single readings" not in html
    assert "epic:k=2: KL to full prefill 0.500 [0.500, 0.500], time to first token (full prefill = 1) 0.400" in html
    work = markdown[markdown.index("### Work") :]
    assert "First token: measured, 5 repeats on a prompt of median length" in work
    row = next(row for row in work.splitlines() if row.startswith("| none |"))
    assert r"| 0.400 \[0.400, 0.400\] | 0.4 | 1.000 | 5.0 |" in row
    assert "x86 &lt;b&gt;; cpu, float32, threads 1; load 0.5 before, 1.5 after" in html
    assert figures[0]["arms"][2]["work"]["timed"]["break_even"] == 5.0
    assert figures[0]["prefix_hit"]["ratio"] == 0.4


def test_kinds_and_few_groups_stand_in_every_form(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    html, markdown, figures = report(run)
    assert "By kind" not in markdown, "items of before kinds were noted have none"
    assert "### Group by group (contains\\_em)" in markdown
    items = [json.loads(each) for each in (run / "items.jsonl").read_text().splitlines()]
    for n, item in enumerate(items):
        item["kind"] = f"kind <{n % 2}>"
    (run / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    html, markdown, figures = report(run)
    assert [(part["name"], part["items"]) for part in figures[0]["by_kind"]] == [("kind <0>", 2), ("kind <1>", 1)]
    assert figures[0]["by_kind"][1]["arms"]["epic:k=2"] == {
        "items": 1, "score": 0.0, "around": None, "base": 1, "lost": 1
    }  # fmt: skip
    assert "<caption>By kind (contains_em)</caption>" in html
    assert "<caption>Damage by kind</caption>" in html
    assert '<th scope="col">kind &lt;1&gt; (1)</th>' in html
    assert len(read_told(run).summary.by_group) == 3
