"""docs/results.md on what was published: verdicts follow the files, and nothing is said of what is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_evaluation_page import cells, kept, script

patterns = script("patterns_measured")


def claim(name: str, kl: float, p: float) -> dict[str, Any]:
    return {"claim": name, "only_arm": 3, "only_against": 1, "p": 0.6, "kl_difference": kl, "kl_p": p}


def study(folder: Path, **parts: Any) -> list[list[str]]:
    empty: dict[str, Any] = {part: [] for part in ("margins", "attribution", "budget", "context", "retrieval")}
    (folder / "repair-budget-tiny.json").write_text(json.dumps({**empty, **parts}))
    return cells(patterns.pattern_section(folder))[2:]


def test_without_files_there_is_no_section(tmp_path: Path) -> None:
    assert patterns.pattern_section(tmp_path) == []


def test_reuse_that_loses_and_reuse_that_is_beaten_by_fewer_documents(tmp_path: Path) -> None:
    run = kept(tmp_path, "made-up", 0.2)
    for lost, verdict in (((-0.9, -0.1), "agrees"), ((-0.9, 0.1), "does not agree")):
        for arm in run["arms"]:
            if arm["method"] == "none":
                arm["scored"]["difference"] = {"value": -0.5, "low": lost[0], "high": lost[1]}
        (tmp_path / "eval" / "made-up.json").write_text(json.dumps([run]))
        row = next(row for row in cells(patterns.pattern_section(tmp_path)) if row[0].startswith("Pure reuse"))
        assert (row[1].startswith("to full: `made-up` -0.500"), row[2]) == (True, verdict)
    kept(tmp_path, "helpless", -0.1, task="helpless")
    assert "helpless" not in "".join(patterns.pattern_section(tmp_path)), "scores say nothing there"


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ((-0.2, 0.01), (-0.1, 0.001), "recomputing is nearer in 2 of 2"),
        ((-0.2, 0.01), (-0.1, 0.2), "recomputing is nearer in 1 of 2"),
        ((-0.2, 0.2), (0.1, 0.01), "recomputing is nearer in 0 of 2, the other way in 1"),
    ],
)
def test_a_claim_over_settings(
    tmp_path: Path, first: tuple[float, float], second: tuple[float, float], verdict: str
) -> None:
    name = "recompute:target against insert:target"
    context = [
        {"of": of, "claims": [claim(name, *each), claim("another", 9, 0)]}
        for of, each in zip("ab", (first, second), strict=True)
    ]
    ((published, found, said),) = study(tmp_path, context=context)
    assert published.startswith("Computing the target again")
    assert f"`a`: right in D 3 to 1 (p 0.6), KL {first[0]:+.3f}" in found
    assert said == verdict


def test_structures_and_attribution(tmp_path: Path) -> None:
    margins = [
        {"of": of, "by": by, "structure": structure, "damage": damage, "base": 40}
        for of, by, structure, damage in [
            ("biography", "structure", "I1", 0.2),
            ("biography", "structure", "I2", 0.6),
            ("biography", "place", "I2", 0.9),
            ("api", "structure", "I1", 0.3),
            ("api", "structure", "I2", 0.3),
            ("empty", "structure", "I1", None),
        ]
    ]
    curve = [{"given": n, "kl": kl} for n, kl in ((0, 1.0), (1, 0.9), (2, 0.7), (4, 0.0))]
    steep = [{"given": n, "kl": kl} for n, kl in ((0, 1.0), (1, 0.2), (2, 0.1), (4, 0.0))]
    rows = study(tmp_path, margins=margins, attribution=[{"of": "x", "curve": curve}, {"of": "y", "curve": steep}])
    assert rows[0][1] == "`biography`: I1 20% of 40, I2 60% of 40; `api`: I1 30% of 40, I2 30% of 40"
    assert [row[2] for row in rows] == ["agrees in 1 of 2", "agrees in 1 of 2"]
    assert "`x`: 2 of 4 take away 30%" in rows[1][1]


def test_who_finds_the_target(tmp_path: Path) -> None:
    hits = {"attention mass": 0.3, "attention density": 0.5, "BM25": 0.9}
    retrieval = [{"of": "x", "items": 9, "hit@1": hits}, {"of": "none known", "items": 0, "hit@1": {}}]
    ((_, found, said),) = study(tmp_path, retrieval=retrieval)
    assert (found, said) == ("`x`: attention mass 30%, attention density 50%, BM25 90%", "agrees")
    hits["attention density"] = 0.9
    assert study(tmp_path, retrieval=retrieval[:1])[0][2] == "does not agree"


def test_what_is_not_there_is_passed_over(tmp_path: Path) -> None:
    """Claims of arms that never ran together, curves without pure reuse, arms that gave no answers."""
    name = "recompute:target against insert:target"
    nothing = {**claim(name, 0.0, 0.0), "kl_difference": None, "kl_p": None}
    curves = [{"of": of, "curve": [{"given": n, "kl": 0.5} for n in given]} for of, given in (("a", ()), ("b", (1, 2)))]
    rows = study(tmp_path, context=[{"of": "a", "claims": [nothing]}], attribution=curves)
    assert rows == []
    run = kept(tmp_path, "made-up", 0.2, task="biography")
    for name in ("kv-packet", "sempic", "joint"):
        run["arms"].append({**run["arms"][2], "method": name, "scored": None})
    (tmp_path / "eval" / "made-up.json").write_text(json.dumps([run]))
    assert not any("kv-packet" in row[0] and "<" in row[0] for row in cells(patterns.pattern_section(tmp_path)))


@pytest.mark.parametrize(("against", "verdict"), [("none:writer=isolated", "agrees"), ("none", "agrees in 1 of 3")])
def test_attention_is_held_against_documents_encoded_alone_where_they_are(
    tmp_path: Path, against: str, verdict: str
) -> None:
    distances = {"none": (1.0, 1.0), "none:writer=isolated": (10.0, 2.0), "kv-packet": (1.0, 1.8), "sempic": (9.0, 1.2)}
    arms = [
        {"method": name, "items": 3, "distance": {"raw": {"front": front, "interior": interior}}}
        for name, (front, interior) in distances.items()
        if name != "none:writer=isolated" or name == against
    ]
    (tmp_path / "attention-tiny.json").write_text(json.dumps({"about": {"task": "made-up"}, "arms": arms}))
    ((_, found, said),) = cells(patterns.pattern_section(tmp_path))[2:]
    assert found.startswith(f"`made-up`, to `{against}`: ")
    assert said == verdict
    if against != "none":
        assert "`kv-packet` 0.1 in front, 0.9 inside, `sempic` 0.9 and 0.6" in found
    without = [arm for arm in arms if arm["method"] != "sempic"]
    (tmp_path / "attention-tiny.json").write_text(json.dumps({"about": {"task": "made-up"}, "arms": without}))
    assert patterns.pattern_section(tmp_path) == []
