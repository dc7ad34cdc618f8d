"""Figures of hand-made lines: which selector is chosen, who wins on D, and what several tasks make of a p."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.figures.significance import mcnemar
from kvquilt.evaluation.run.arms import find_arm
from kvquilt.evaluation.studies.repair_budget_arms import called, chosen_of, given_steps, token_selectors
from kvquilt.evaluation.studies.repair_budget_figures import figures
from kvquilt.evaluation.studies.target_hits import hit_rates
from kvquilt.evaluation.tasks.item import Item
from kvquilt.ledger import Ledger

BEST = "retrieved-document:5%"
CANDIDATES = {
    "cacheblend": ["cacheblend:5%"],
    "epic": ["epic:k=9,5%"],
    "random": ["random:seed=0,5%", "random:seed=1,5%"],
}


def line(item: int, method: str, kl: float | None, right: bool = False) -> dict[str, Any]:
    """An arm on an item; with no KL one that was refused."""
    made: dict[str, Any] = {"item": f"q{item}", "group": f"g{item}", "method": method, "refused": None}
    made["prompt"] = {"tokens": 100}
    if kl is None:
        nothing = dict.fromkeys(("score", "right", "scores", "fidelity", "ledger"))
        return made | nothing | {"refused": "its probe costs more", "seconds": {"prompt": 0.0}}
    ledger = {k: v for k, v in Ledger(method=method).as_dict().items() if k != "seconds"}  # the line has its own
    rows = {"kl": [kl, kl], "agree": [1.0, 0.0], "nll": [1.0, 1.0]}
    return made | {
        "answer": "so", "score": float(right), "right": right,
        "scores": {"micro_f1_bag": [int(right), 0, int(not right)]},
        "fidelity": {"gold": rows} if method == "full" else {"self": rows, "gold": rows},
        "ledger": {**ledger, "flops": 1.0}, "seconds": {"first_token": 1.0, "processor": 1.0},
    }  # fmt: skip


def write(folder: Path, study: dict[str, Any], lines: list[dict[str, Any]], methods: list[str]) -> None:
    folder.mkdir(parents=True)
    items = list(dict.fromkeys(each["item"] for each in lines))
    run = {"config": {"methods": methods, "silent": [], "metric": {"grader": "contains_em"}}}
    about = {"study": study, "model": "hand-made"}
    (folder / "run.json").write_text(json.dumps({"run": run, "about": about, "controls": {}}))
    rows = [{"item": item, "gold": [0], "ranking": [0], "group": item, "task": "t"} for item in items]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lines.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def tuning(folder: Path, task: str, kl: Mapping[str, list[float | None]]) -> None:
    study = {"part": "budget", "of": task, "measures": "arms", "split": "tuning", "candidates": CANDIDATES}
    arms = {"full": [0.0, 0.0], "no-context": [9.0, 9.0], **kl}
    lines = [line(n, name, values[n]) for n in range(2) for name, values in arms.items()]
    write(folder / "budget" / task / "tuning", study, lines, list(arms))


def evaluation(folder: Path, task: str, right: Mapping[str, str]) -> None:
    """`right`: by arm, a sign for each item."""
    study = {"part": "budget", "of": task, "measures": "arms", "split": "evaluation", "budget": "5%"}
    count = len(right["full"])
    lines = [line(n, name, 0.5, signs[n] == "+") for n in range(count) for name, signs in right.items()]
    write(folder / "budget" / task / "evaluation", study, lines, list(right))


KL: dict[str, list[float | None]] = {
    "none": [1.0, 3.0],
    "cacheblend:5%": [0.0, None],  # refused: pure reuse's 3.0, so 1.5
    "epic:k=9,5%": [1.0, 1.8],
    "random:seed=0,5%": [0.1, 0.1],
    "random:seed=1,5%": [3.0, 3.0],  # 1.55 over both draws
}


def test_a_refused_selector_mends_nothing_and_draws_count_together(tmp_path: Path) -> None:
    tuning(tmp_path, "one", KL)
    evaluation(tmp_path, "one", {"full": "+", "no-context": "-", "none": "-", BEST: "+", "epic:k=9,5%": "-"})
    (budget,) = figures(tmp_path)["budget"]
    chosen = budget["chosen"]
    assert chosen["kl"] == pytest.approx({"cacheblend": 1.5, "epic": 1.4, "random": 1.55})
    assert (chosen["name"], chosen["arm"], chosen["none"]) == ("epic", "epic:k=9,5%", 2.0)
    assert chosen["refused"]["cacheblend:5%"] == 1


def test_pairs_are_of_d_and_p_is_adjusted_over_tasks(tmp_path: Path) -> None:
    signs = {
        "full": "+++++++-",
        "no-context": "------+-",
        "none": "-----+++",  # outside D both are right
        BEST: "++++++-+",
    }
    for task in ("one", "two"):
        evaluation(tmp_path, task, signs)
    claims = [claim for each in figures(tmp_path)["budget"] for claim in each["claims"] if claim["against"] == "none"]
    assert len(claims) == 2
    for claim in claims:
        assert (claim["base"], claim["only_arm"], claim["only_against"], claim["enough"]) == (6, 5, 0, False)
        assert claim["p"] == pytest.approx(2 * mcnemar(5, 0))
        assert claim["kl_difference"] == 0.0
        assert claim["kl_p"] == 1.0
    assert all(each["chosen"] is None for each in figures(tmp_path)["budget"])


def test_a_claim_is_made_where_both_arms_could_run(tmp_path: Path) -> None:
    evaluation(tmp_path, "one", {"full": "++", "no-context": "--", "none": "--", BEST: "++"})
    path = tmp_path / "budget" / "one" / "evaluation" / "lines.jsonl"
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    lines[3] = line(0, BEST, None)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    (budget,) = figures(tmp_path)["budget"]
    claim = next(claim for claim in budget["claims"] if claim["against"] == "none")
    assert (claim["items"], claim["base"], claim["only_arm"]) == (1, 1, 1)
    assert next(arm for arm in budget["arms"] if arm["arm"] == BEST)["refused"] == 1


def test_hits_at_one() -> None:
    def scored(gold: list[int], mass: list[float], bm25: list[float]) -> dict[str, Any]:
        return {"gold": gold, "scores": {"attention mass": mass, "BM25": bm25}}

    lines = [scored([1], [0.2, 0.8], [1.0, 0.0]), scored([0], [0.5, 0.5], [0.0, 2.0]), scored([], [1.0], [1.0])]
    found = hit_rates([*lines, scored([1, 2], [0.1, 0.3, 0.6, 0.0], [0.0, 0.0, 1.0, 0.0])])
    assert found["items"] == 3
    assert found["chance"] == 0.5
    assert found["hit@1"] == pytest.approx({"attention mass": 1.0, "BM25": 1 / 3})
    assert hit_rates(lines[2:]) == {"items": 0, "chance": None, "hit@1": {}}


def test_what_is_chosen_from() -> None:
    named = token_selectors("5%", 2)
    assert list(named) == ["cacheblend", "infoflow", "prophetkv", "fusionrag", "epic", "random"]
    assert named["random"] == ("random:seed=0,5%", "random:seed=1,5%")
    assert chosen_of({"a": 1.0, "b": 1.0, "c": 2.0}, {"x": ("c",), "y": ("a", "b"), "z": ("b",)})[0] == "y"
    with pytest.raises(InputError, match="no figure"):
        chosen_of({"a": 1.0}, {"x": ("b",)})


def test_arms_are_called_what_a_reader_understands() -> None:
    (epic,) = token_selectors("5%", 1)["epic"]
    assert find_arm(epic).name == epic
    assert called(epic) == "epic:5% (k by the budget)"
    assert [called(each) for each in ("epic:k=16,5%", "none", "full-again")] == [
        "epic:k=16,5%", "none", "full-again (noise floor)"
    ]  # fmt: skip


def test_steps_of_attribution() -> None:
    def item(documents: int) -> Item:
        return Item("q", tuple(Document(f"text {n}") for n in range(documents)), "Which?", ("a",), (0,), "g", "t")

    assert list(given_steps([item(4)], 1).values()) == [1, 2, 3]
    assert list(given_steps([item(4), item(13)], 1).values()) == [1, 2, 4, 8, 12]
    with pytest.raises(InputError, match="does not rest on"):
        given_steps([item(1)], 1)
