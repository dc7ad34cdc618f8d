"""A study of attention on a tiny model, and its summary from lines that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError, IntegrityError
from kvquilt.evaluation.run.folder import EvaluationFolder
from kvquilt.evaluation.studies.attention_plot import pictures
from kvquilt.evaluation.studies.attention_run import AttentionRun, find_attention_arms
from kvquilt.evaluation.studies.attention_summary import summarise_attention
from kvquilt.evaluation.tasks.item import Item
from tests.engines import at_rest, documents, make_engine

METHODS = ("epic:k=3", "retrieved-document", "samkv:60%", "sempic", "encoder", "prophetkv:1%")
ARMS = ["full", "full-again", "none", *METHODS]


def items(count: int = 2) -> list[Item]:
    return [
        Item(
            f"item-{n}", tuple(documents(5)[n : n + 3]), "What does it do?", ("It opens", "x"), (0,), f"g{n}", "topics"
        )
        for n in range(count)
    ]


def run(folder: Path, engine: Any, methods: tuple[str, ...] = METHODS, count: int = 2) -> AttentionRun:
    return AttentionRun(engine, items(count), methods, folder, about={"task": "topics"})


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attention")
    with make_engine(trained=True) as engine:
        lent = engine.model.pool.lent
        run(folder, engine).go()
        at_rest(engine, lent=lent)
    return folder


def test_a_line_for_every_item_and_arm(whole: Path) -> None:
    found = lines(whole)
    assert [(line["item"], line["method"]) for line in found] == [(f"item-{n}", arm) for n in range(2) for arm in ARMS]
    by_arm = {line["method"]: line for line in found[: len(ARMS)]}
    assert by_arm["prophetkv:1%"]["refused"].startswith("budget: ")
    assert "raw" not in by_arm["prophetkv:1%"]
    full, none = by_arm["full"], by_arm["none"]
    assert (len(full["raw"]), len(full["raw"][0]), len(full["raw"][0][0])) == (3, 4, 3)
    assert full["rows"] == none["rows"] > 1
    assert {arm: line["seen"] for arm, line in by_arm.items() if line["refused"] is None and line["seen"] != 1} == {
        "samkv:60%": by_arm["samkv:60%"]["seen"],
        "encoder": 0.0,
    }
    assert 0 < by_arm["samkv:60%"]["seen"] < 1


def test_full_prefill_is_at_no_distance_and_its_other_layout_at_rounding(whole: Path) -> None:
    arms = {arm.method: arm for arm in summarise_attention(whole).arms}
    assert list(arms) == ARMS[:-1]
    assert set(arms["full"].distance["raw"].values()) == {0.0}
    assert arms["full"].nrmse == 0.0
    assert arms["none"].distance["raw"]["interior"] > 0
    assert arms["full-again"].ratio["raw"]["interior"] < 1e-3
    assert arms["none"].ratio["raw"] == dict.fromkeys(("front", "interior", "rear"), 1.0)
    assert arms["encoder"].nrmse == pytest.approx(1.0)
    assert arms["epic:k=3"].ratio["raw"]["front"] != 1.0


def test_pictures_and_json(whole: Path) -> None:
    summary = summarise_attention(whole)
    drawn = pictures(summary)
    assert set(drawn) == {"distance-heads.png", "distance-places.png", "retrieval-heads.png", "curves.png"}
    assert all(png.startswith(b"\x89PNG") for png in drawn.values())
    told = json.loads(json.dumps(summary.as_dict(), allow_nan=False))
    assert told["about"] == {"task": "topics"}
    assert [arm["method"] for arm in told["arms"]] == ARMS[:-1]


class Stopped(Exception):
    pass


def test_a_study_that_was_stopped_gives_what_one_that_was_not_gives(whole: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 4:
            raise Stopped

    with make_engine(trained=True) as engine:
        lent = engine.model.pool.lent
        with pytest.raises(Stopped):
            run(tmp_path, engine).go(stop)
        at_rest(engine, lent=lent)
    with (tmp_path / "lines.jsonl").open("ab") as out:
        out.write(b'{"item": "item-0", "meth')
    seen: list[tuple[int, int]] = []
    with make_engine(trained=True) as engine:
        run(tmp_path, engine).go(lambda done, total: seen.append((done, total)))
        with pytest.raises(InputError, match="differs in methods"):
            run(tmp_path, engine, METHODS[:1]).go()
    assert (tmp_path / "lines.jsonl").read_bytes() == (whole / "lines.jsonl").read_bytes()
    assert seen == [(n, 18) for n in range(5, 19)]


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown method"):
        find_attention_arms(["non"])
    with pytest.raises(InputError, match="only `kvquilt eval` has"):
        find_attention_arms(["no-context"])
    with make_engine() as engine:
        with pytest.raises(InputError, match="items"):
            AttentionRun(engine, [], (), tmp_path).go()
        with pytest.raises(InputError, match="twice"):
            AttentionRun(engine, items(1) * 2, (), tmp_path).go()
    with pytest.raises(InputError, match="no study of attention"):
        summarise_attention(tmp_path)


def written(folder: Path, *held: dict[str, Any]) -> Path:
    """A folder with such lines of one layer and head."""
    files = EvaluationFolder(folder)
    with files.held():
        files.write({"run": {"kind": "attention"}, "about": {}, "controls": {}}, [], [])
        for line in held:
            files.add({"refused": None, **line})
    return folder


def line(item: str, method: str, off: float | None, **more: Any) -> dict[str, Any]:
    numbers = {
        "raw": [[[None, off, None]]], "within": [[[None, off, None]]], "by_position": [[off] * 20],
        "density": [[6.0, 3.0, *[None] * 6]], "interior": [2.0], "error": [[1.0]], "norm": [[4.0]],
        "cosine": [[None]], "mass": [[0.5]], "seen": 1.0,
    }  # fmt: skip
    return {"item": item, "group": item, "method": method, **numbers, **more}


def test_means_ratios_and_errors_by_hand(tmp_path: Path) -> None:
    made = [
        line("a", "none", 1.0), line("a", "new", 0.1), line("b", "none", 3.0),
        line("b", "new", 0.3, error=[[5.0]], norm=[[8.0]], density=[[2.0, 1.0, *[None] * 6]], interior=[1.0]),
        line("c", "none", 50.0), {"item": "c", "group": "c", "method": "new", "refused": "budget: too small"},
    ]  # fmt: skip
    none, new = summarise_attention(written(tmp_path, *made)).arms
    assert (new.items, new.refused) == (2, 1)
    assert new.distance["raw"]["interior"] == pytest.approx(0.2)
    assert new.standard_error["raw"]["interior"] == pytest.approx(0.1)
    assert new.ratio["raw"]["interior"] == pytest.approx(0.4 / 4), "of means, over the items that both have"
    assert none.ratio["raw"]["interior"] == 1.0
    assert new.density[:2] == pytest.approx([4.0 / 1.5, 2.0 / 1.5]), "of means, too"
    assert new.nrmse == pytest.approx((6 / 12) ** 0.5)
    assert new.as_dict()["cosine"] is None
    assert new.as_dict()["distance"]["raw"] == {"front": None, "interior": 0.2, "rear": None}


def test_a_damaged_line_is_told(tmp_path: Path) -> None:
    folder = written(tmp_path, line("a", "none", 1.0))
    with (folder / "lines.jsonl").open("ab") as out:
        out.write(b"no line\n")
    with pytest.raises(IntegrityError, match="line 2 is damaged"):
        summarise_attention(folder)
