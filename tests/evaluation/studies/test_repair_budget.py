"""A study of the repair budget on a tiny model: its settings, its folders, its figures, and going on where it was."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from kvquilt.engine import Engine
from kvquilt.errors import InputError
from kvquilt.evaluation.studies.repair_budget import RepairBudgetStudy, StudyProgress
from kvquilt.evaluation.studies.repair_budget_figures import figures
from kvquilt.evaluation.studies.repair_budget_plot import pictures
from kvquilt.evaluation.studies.repair_budget_settings import DISTANCES, HITS, RepairBudget, folder_names, settings
from kvquilt.evaluation.studies.repair_budget_text import markdown, study_tables
from kvquilt.files import held
from tests.engines import at_rest, make_engine

NAMES = ("with", "while", "assert", "if", "pass", "break", "global", "del", "for", "try", "class", "return")
PARTS = ("attribution", "budget", "context", "retrieval")


def length(text: str) -> int:
    return len(text.split())


def written(folder: Path, gold: tuple[int | None, ...] = (2, 1, 2, 0)) -> str:
    """Four questions over three documents each, none in common: two tune, two evaluate."""
    rows: list[dict[str, Any]] = []
    for n, at in enumerate(gold):
        held = [{"id": name, "text": topics[name].strip()[:60]} for name in NAMES[3 * n : 3 * n + 3]]
        row = {"id": f"q{n}", "documents": held, "question": f"What is {NAMES[3 * n]}?", "answers": ["It"]}
        rows.append(row if at is None else row | {"gold": [at]})
    path = folder / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return f"jsonl:{path}"


def small(task: str, **changed: Any) -> RepairBudget:
    plan = RepairBudget(
        tasks=(task,), parts=PARTS, kinds=("biography",), structures=("I0", "I2"), distractors=(1,), places=("last",),
        budget="40%", cell_items=1, items=2, tuning_items=2, seeds=2, new_tokens=3,
    )  # fmt: skip
    return dataclasses.replace(plan, **changed)


def study(plan: RepairBudget, folder: Path, engine: Engine) -> RepairBudgetStudy:
    return RepairBudgetStudy(lambda system: engine, plan, folder, called=lambda task: task.partition(":")[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[RepairBudget, Path, dict[str, Any]]:
    """A study that nobody stopped."""
    folder, engine = tmp_path_factory.mktemp("whole"), make_engine()
    plan = small(written(folder))
    study(plan, folder / "study", engine).go()
    at_rest(engine)
    return plan, folder / "study", figures(folder / "study")


def test_every_setting_has_a_folder(tmp_path: Path) -> None:
    made = {each.folder: each for each in settings(small(written(tmp_path), parts=("structure", *PARTS)), length)}
    assert list(made) == [
        "structure/biography/I0", "structure/biography/I2-1-last", "attribution/jsonl", "budget/jsonl/tuning",
        "budget/jsonl/evaluation", "context/jsonl/answers", "context/jsonl/distances", "retrieval/jsonl",
    ]  # fmt: skip
    tuning, evaluation = (made[f"budget/jsonl/{split}"] for split in ("tuning", "evaluation"))
    assert not {item.id for item in tuning.items} & {item.id for item in evaluation.items}
    assert set(tuning.config.methods) - {"none"} < set(evaluation.config.methods)
    assert set(tuning.config.silent) == {*tuning.config.methods, "no-context"}  # chosen by distance
    assert evaluation.config.silent == ()
    assert {"random:seed=0,40%", "random:seed=1,40%", "infoflow-reorder:40%"} < set(evaluation.config.methods)
    assert made["attribution/jsonl"].about["given"] == {
        f"insert:others={k},seed={seed}": k for seed in (0, 1) for k in (1, 2)
    }
    assert made["context/jsonl/distances"].measures == DISTANCES
    assert made["retrieval/jsonl"].measures == HITS
    assert folder_names(["biography", "api_docs", "biography:people=40"]) == ["biography", "api_docs", "biography-2"]


def test_items_that_do_not_say_what_they_rest_on(tmp_path: Path) -> None:
    made = {each.folder: each for each in settings(small(written(tmp_path, (2, 1, None, 0))), length)}
    assert [item.id for item in made["context/jsonl/answers"].items] == ["q3"]
    assert made["context/jsonl/answers"].about["items without known gold"] == 1
    assert len(made["budget/jsonl/evaluation"].items) == 2
    nothing = small(written(tmp_path, (None,) * 4))
    with pytest.raises(InputError, match="only --part budget"):
        settings(nothing, length)
    assert len(settings(dataclasses.replace(nothing, parts=("budget",)), length)) == 2


def test_a_deranged_arm_without_a_partner_is_left_out_and_said(tmp_path: Path) -> None:
    plan = small(written(tmp_path), items=1, parts=("budget",))
    evaluation = settings(plan, length)[1]
    assert "deranged:none" not in evaluation.config.methods
    assert list(evaluation.about["left out"]) == ["deranged:none"]


def test_every_part_has_figures(whole: tuple[RepairBudget, Path, dict[str, Any]]) -> None:
    _, folder, found = whole
    assert found["unfinished"] == []
    assert found["refused"] == {}
    (curve,) = (each["curve"] for each in found["attribution"])
    assert [(point["given"], point["draws"]) for point in curve] == [(0, 1), (1, 2), (2, 2)]
    (budget,) = found["budget"]
    by_arm = {arm["arm"]: arm for arm in budget["arms"]}
    assert by_arm["full-again"]["kl"]["value"] < 1e-5 < by_arm["none"]["kl"]["value"]
    assert budget["chosen"]["arm"] in by_arm
    assert budget["chosen"]["kl"][budget["chosen"]["name"]] == min(budget["chosen"]["kl"].values())
    assert {claim["arm"] for claim in budget["claims"]} == {"retrieved-document:40%"}
    assert any(claim["against"] == budget["chosen"]["arm"] for claim in budget["claims"])
    # what cannot pay for its probe is there, and counted
    assert all(arm["items"] + arm["refused"] == 2 for arm in budget["arms"])
    (context,) = found["context"]
    inserted, recomputed, none = (context["distances"][name] for name in ("insert:target", "recompute:target", "none"))
    assert inserted["keys"]["l2"] == inserted["values"]["l2"] == [0.0, 0.0, 0.0]
    assert max(none["keys"]["l2"][0], none["values"]["l2"][0]) < 1e-5  # layer 0 depends on the token alone
    assert none["values"]["l2"][2] > recomputed["values"]["l2"][2] > 0
    assert none["values"]["cosine"][2] < recomputed["values"]["cosine"][2] < 1
    assert found["retrieval"][0]["items"] == 2
    assert found["retrieval"][0]["chance"] == pytest.approx(1 / 3)
    assert set(found["retrieval"][0]["hit@1"]) == {"attention mass", "attention density", "BM25"}
    about = json.loads((folder / "budget" / "jsonl" / "evaluation" / "run.json").read_text())["about"]
    assert (about["task"], about["split"], about["score"]) == ("jsonl", "evaluation", "contains_em")


def test_figures_are_told(whole: tuple[RepairBudget, Path, dict[str, Any]]) -> None:
    found = whole[2]
    tables = study_tables(found)
    assert all(len(row) == len(table.head) for table in tables for row in table.rows)
    text = markdown(found)
    for title in ("Attribution: jsonl", "Budget: jsonl", "Context: jsonl", "Retrieval", "Fewer than 30 questions"):
        assert title in text
    assert "do not clearly help" in text
    drawn = pictures(found)
    assert set(drawn) == {"structure.png", "budget.png", "context.png"}
    assert all(png.startswith(b"\x89PNG") for png in drawn.values())


class _Stop(Exception):
    pass


def test_a_study_that_was_stopped_goes_on(whole: tuple[RepairBudget, Path, dict[str, Any]], tmp_path: Path) -> None:
    plan = dataclasses.replace(whole[0], parts=("context", "retrieval"))
    told: list[StudyProgress] = []

    def stop(now: StudyProgress) -> None:
        told.append(now)
        if now.setting == "context/jsonl/distances" and not now.begins:
            raise _Stop

    with pytest.raises(_Stop):
        study(plan, tmp_path, make_engine()).go(stop)
    half = figures(tmp_path)
    assert half["unfinished"] == ["context/jsonl/distances"]
    assert half["context"][0]["distances"] is None
    again: list[StudyProgress] = []
    study(plan, tmp_path, make_engine()).go(again.append)
    # answers: full, no context and six arms on two items; distances: full and four on two; retrieval: two
    assert [(now.setting, now.done, now.begins) for now in again] == [
        ("context/jsonl/answers", 16, True), ("context/jsonl/distances", 16 + 5, True),
        ("context/jsonl/distances", 16 + 10, False), ("retrieval/jsonl", 26, True),
        ("retrieval/jsonl", 27, False), ("retrieval/jsonl", 28, False),
    ]  # fmt: skip
    assert {(now.total, now.settings) for now in (*told, *again)} == {(28, 3)}
    assert [now.done for now in told if now.setting == "context/jsonl/answers"] == list(range(17))
    assert again[-1].number == 3
    full, mine = whole[2], figures(tmp_path)
    assert mine["context"][0]["distances"] == full["context"][0]["distances"]
    assert mine["retrieval"] == full["retrieval"]
    with pytest.raises(InputError, match="it differs in items"):
        study(dataclasses.replace(plan, items=1), tmp_path, make_engine()).go()


def test_two_processes_do_not_share_a_study(tmp_path: Path) -> None:
    plan = small(written(tmp_path), parts=("retrieval",))
    with held(tmp_path / "study", "folder", "measures into"), pytest.raises(InputError, match="another process"):
        study(plan, tmp_path / "study", make_engine()).go()
    assert not (tmp_path / "study" / "retrieval").exists()


def test_by_default_a_study_is_an_impression() -> None:
    prompts = sum(setting.prompts for setting in settings(RepairBudget(), len))
    assert 200 < prompts < 500


def test_structure_of_one_target(tmp_path: Path) -> None:
    plan = small(written(tmp_path), parts=("structure",), new_tokens=24)
    study(plan, tmp_path / "study", make_engine()).go()
    found = figures(tmp_path / "study")
    alone, beside = found["structure"]
    kl = [next(arm for arm in cell["arms"] if arm["arm"] == "none")["kl"]["value"] for cell in (alone, beside)]
    assert kl[0] < 1e-5 < kl[1]  # alone it stands behind the very tokens it was encoded behind
    assert [(m["structure"], m["by"]) for m in found["margins"]][:2] == [("I0", "structure"), ("I2", "structure")]
    assert len(study_tables(found)) == 2


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"parts": ("structur",)}, "structure"),
        ({"parts": ()}, "name at least one"),
        ({"distractors": (0,)}, "from 1"),
        ({"distractors": (43,)}, "from 1 to 42"),
        ({"distractors": (16,), "kinds": ("biography", "api_docs")}, "from 1 to 15"),
        ({"budget": "5 percent"}, "5%"),
        ({"more": ("nine",)}, "did you mean 'none'"),
        ({"tasks": ("biografy",)}, "did you mean 'biography'"),
        ({"tasks": ()}, "name at least one"),
        ({"seeds": 0}, "from 1"),
    ],
)
def test_what_is_no_study(changed: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        RepairBudget(**changed)


def test_a_folder_without_a_study(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no study"):
        figures(tmp_path)
