"""Runs on a tiny model: every arm on every item, and stopping anywhere changes nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvquilt.document import Document
from kvquilt.engine import Engine
from kvquilt.errors import ContextLengthError, InputError, IntegrityError, UnsupportedModelError
from kvquilt.evaluation.figures.summarising import summarise
from kvquilt.evaluation.run import run as running
from kvquilt.evaluation.run import sounding
from kvquilt.evaluation.run.config import RunConfig
from kvquilt.evaluation.run.folder import Line
from kvquilt.evaluation.run.run import Finished, Run, RunProgress, read_finished
from kvquilt.evaluation.run.sounding import Sounder, gold_ids
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.item import Item
from kvquilt.ledger import Ledger
from kvquilt.repair import operator
from tests.engines import at_rest, documents, make_engine

METHODS = (
    "none",
    "retrieved-document",
    "epic:k=3",
    "fewer-documents:1",
    "full-again",
    "full-in-order-of:retrieved-document",
)
ARMS = ("full", "no-context", *METHODS)
CONFIG = RunConfig(METHODS, Metric("contains_em"), new_tokens=6, self_tokens=4)


def items(count: int = 3) -> list[Item]:
    made = []
    for n in range(count):
        # other documents in another order each time, two of them in common
        held = tuple(dict.fromkeys((*documents(8)[n : n + 2], *documents(8)[3:5])))
        asked = f"What does the statement {held[n % 2].id} do?"
        made.append(Item(f"item-{n}", held, asked, (held[0].text.split()[0],), (0,), f"group-{n // 2}", "topics"))
    return made


def run(folder: Path, engine: Engine | None = None, config: RunConfig = CONFIG, count: int = 3, **options: Any) -> Run:
    return Run(engine or make_engine(), items(count), config, folder, **options)


def timeless(lines: tuple[Line, ...]) -> list[str]:
    """Lines byte for byte but for their seconds."""
    return [json.dumps({k: v for k, v in line.items() if k != "seconds"}) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder).go()


def by_arm(found: Finished, item: str = "item-1") -> dict[str, Line]:
    return {line["method"]: line for line in found.lines if line["item"] == item}


def test_a_line_for_every_item_and_arm_in_order(whole: tuple[Path, Finished]) -> None:
    folder, found = whole
    assert [(line["item"], line["method"]) for line in found.lines] == [
        (f"item-{n}", arm) for n in range(3) for arm in ARMS
    ]
    assert [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()] == list(found.lines)
    assert found.refused == {}
    kept = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    assert [each["item"] for each in kept] == ["item-0", "item-1", "item-2"]
    assert all(sorted(each["ranking"]) == list(range(len(each["documents"]))) for each in kept)


def test_answers_are_those_of_the_engine(whole: tuple[Path, Finished]) -> None:
    item, lines = items()[1], by_arm(whole[1])
    for arm in ("full", "none", "epic:k=3"):
        with make_engine() as engine:
            engine.compile(item.documents, gate=False)
            engine.ask(item.question, item.documents, method="none", max_new_tokens=1)  # compiles the opening
            answer = engine.ask(item.question, item.documents, method=arm, max_new_tokens=6)
        assert lines[arm]["answer"] == answer.text
        assert lines[arm]["tokens"][: len(answer.token_ids)] == list(answer.token_ids)
        assert lines[arm]["stop"] == answer.stop_reason
        assert Ledger.from_dict({**lines[arm]["ledger"], "seconds": {}}).tokens == answer.ledger.tokens


def test_prompts_of_the_controls(whole: tuple[Path, Finished]) -> None:
    engine, item = make_engine(), items()[1]
    lines, tokenizer = by_arm(whole[1]), engine.model.tokenizer
    ranking = json.loads((whole[0] / "items.jsonl").read_text().splitlines()[1])["ranking"]

    def tokens(*held: Document) -> int:
        return len(engine.prompt(item.question, held).ids(tokenizer))

    assert lines["no-context"]["prompt"]["tokens"] == tokens()
    assert lines["fewer-documents:1"]["prompt"]["tokens"] == tokens(item.documents[ranking[0]])
    assert lines["full-again"]["prompt"] == lines["none"]["prompt"] == lines["full"]["prompt"]
    moved = [use["id"] for use in lines["retrieved-document"]["ledger"]["documents"]]
    assert moved[-1] == item.documents[ranking[0]].id
    assert moved != [d.id for d in item.documents]
    again = [use["id"] for use in lines["full-in-order-of:retrieved-document"]["ledger"]["documents"]]
    assert again == moved


def test_methods_on_other_terms(tmp_path: Path) -> None:
    held = documents(6)
    made = [
        Item(f"item-{n}", (held[n], held[n + 2], held[n + 4]), "What does it do?", ("x",), (2,), f"g-{n}", "topics")
        for n in range(2)
    ]
    config = dataclasses.replace(CONFIG, methods=("oracle:retrieved-document", "deranged:none", "none"))
    found = Run(make_engine(), made, config, tmp_path).go()
    assert found.refused == {}
    for n in range(2):
        lines = by_arm(found, f"item-{n}")
        used = {arm: [use["id"] for use in line["ledger"]["documents"]] for arm, line in lines.items()}
        assert used["oracle:retrieved-document"][-1] == made[n].documents[2].id
        assert used["deranged:none"] == [document.id for document in made[1 - n].documents]
        assert lines["deranged:none"]["ledger"]["tokens"]["reused"] > 0
        assert lines["deranged:none"]["ledger"]["forward_tokens"]["compile"] == 0


def test_fidelity_is_to_full_prefill(whole: tuple[Path, Finished]) -> None:
    lines = by_arm(whole[1])
    gold = len(gold_ids(make_engine(), items()[1]))
    full = lines["full"]
    assert full["fidelity"].keys() == {"gold"}
    for arm in ARMS[1:]:
        own, accepted = lines[arm]["fidelity"]["self"], lines[arm]["fidelity"]["gold"]
        assert len(own["kl"]) == len(own["agree"]) == min(4, len(full["tokens"]))
        assert len(accepted["kl"]) == len(accepted["nll"]) == len(full["fidelity"]["gold"]["nll"]) == gold
    floor = lines["full-again"]["fidelity"]
    assert max(floor["self"]["kl"] + floor["gold"]["kl"]) < 1e-5
    assert floor["gold"]["nll"] == pytest.approx(full["fidelity"]["gold"]["nll"], rel=1e-3)
    assert lines["none"]["fidelity"]["self"]["kl"][0] > 1e-3, "the model sees no difference, so nothing is tested"
    assert lines["no-context"]["fidelity"]["self"]["kl"][0] > 1e-3


def test_every_score_has_its_name(whole: tuple[Path, Finished]) -> None:
    line = by_arm(whole[1])["none"]
    assert {"contains_em", "squad_f1", "micro_f1_bag"} <= line["scores"].keys()
    assert line["score"] == line["scores"]["contains_em"]
    assert line["right"] is (line["score"] >= 1)
    words = len(line["answer"].split())
    assert sum(line["scores"]["micro_f1_bag"][:2]) == words


def test_a_finished_folder_is_read_and_summarised_without_a_model(whole: tuple[Path, Finished], tmp_path: Path) -> None:
    found = read_finished(whole[0])
    assert found == whole[1]
    summary = summarise(found, resamples=200)
    assert [arm.method for arm in summary.arms] == list(ARMS)
    assert json.loads(json.dumps(summary.as_dict()))["items"] == 3
    floor = next(arm for arm in summary.arms if arm.method == "full-again")
    assert floor.fidelity is not None
    assert floor.fidelity.own.max < 1e-5
    assert floor.work is not None
    assert floor.work.flops == pytest.approx(1.0)
    with pytest.raises(InputError, match="holds no run"):
        read_finished(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        read_finished(tmp_path / "missing")
    study = {"run": {"kind": "attention"}, "about": {}, "controls": {}}
    (tmp_path / "run.json").write_text(json.dumps(study))
    with pytest.raises(InputError, match="holds a study of attention, no run"):
        read_finished(tmp_path)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("lines", [1, 8, 11])
@pytest.mark.parametrize("stored", [False, True], ids=["memory", "disk"])
def test_a_run_that_was_stopped_gives_what_one_that_was_not_gives(
    whole: tuple[Path, Finished], tmp_path: Path, lines: int, stored: bool
) -> None:
    def stop(progress: RunProgress) -> None:
        if progress.done == lines:
            raise Stopped

    def engine() -> Engine:
        return make_engine(directory=tmp_path / "store" if stored else None)

    folder = tmp_path / "run"
    with engine() as first, pytest.raises(Stopped):
        run(folder, first).go(stop)
    with (folder / "lines.jsonl").open("ab") as out:
        out.write(b'{"item": "item-0", "meth')  # what a power cut leaves
    with engine() as second:
        seen: list[RunProgress] = []
        lent = second.model.pool.lent
        found = run(folder, second).go(seen.append)
        at_rest(second, lent=lent)
    assert timeless(found.lines) == timeless(whole[1].lines)
    kept = (lines - 1) // len(ARMS) * len(ARMS)  # an item that was not whole begins anew
    assert [each.done for each in seen] == list(range(kept + 1, len(ARMS) * 3 + 1))
    for name in ("items.jsonl", "run.json"):
        assert (folder / name).read_bytes() == (whole[0] / name).read_bytes()


def test_nothing_that_is_there_is_computed_again(
    whole: tuple[Path, Finished], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(Sounder, "lines", never)
    monkeypatch.setattr(running, "tried", never)
    before = (whole[0] / "lines.jsonl").read_bytes()
    assert run(whole[0]).go() == whole[1]
    assert (whole[0] / "lines.jsonl").read_bytes() == before
    with pytest.raises(AssertionError, match="computed again"):
        run(tmp_path).go()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"new_tokens": 7}, "config.new_tokens;"),
        ({"metric": Metric("squad_f1", right=0.5)}, "config.metric.grader, config.metric.right;"),
        ({"methods": METHODS[:2]}, "config.methods;"),
        ({"silent": ("none",), "self_tokens": 3}, "config.self_tokens, config.silent;"),
    ],
)
def test_a_folder_of_another_configuration_is_refused(
    whole: tuple[Path, Finished], change: dict[str, Any], names: str
) -> None:
    with pytest.raises(InputError, match=f"differs in {names}"):
        run(whole[0], config=dataclasses.replace(CONFIG, **change)).go()


def of_device(folder: Path, run: str | None, about: str | None) -> None:
    """What is said of the device in a folder: where nothing was said, an earlier version made it."""
    path = folder / "run.json"
    stored = json.loads(path.read_text())
    for part, device in (("run", run), ("about", about)):
        stored[part].pop("device", None)
        stored[part] |= {} if device is None else {"device": device}
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize(("named", "told"), [("cuda", "cuda:0"), ("cuda", None), (None, "cuda:0"), (None, "mps")])
def test_a_folder_of_another_device_is_refused(
    whole: tuple[Path, Finished], tmp_path: Path, named: str | None, told: str | None
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "run")
    of_device(folder, named, told)
    with pytest.raises(InputError, match="differs in device; choose another folder"):
        run(folder).go()


@pytest.mark.parametrize(("named", "told"), [("cpu", None), (None, "cpu"), (None, None)])
def test_a_folder_of_this_device_goes_on_also_one_that_an_earlier_version_made(
    whole: tuple[Path, Finished], tmp_path: Path, caplog: pytest.LogCaptureFixture, named: str | None, told: str | None
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "run")
    of_device(folder, named, told)
    lines = (folder / "lines.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "lines.jsonl").write_bytes(b"".join(lines[: len(ARMS)]))
    assert timeless(run(folder).go().lines) == timeless(whole[1].lines)
    assert ("does not say on which device" in caplog.text) is (named is None and told is None)


def test_a_folder_of_another_engine_or_of_other_items_is_refused(whole: tuple[Path, Finished]) -> None:
    for wrong, names in (
        (run(whole[0], make_engine(shared_prefix=False)), "writer;"),
        (run(whole[0], make_engine("qwen2")), "model;"),
        (run(whole[0], make_engine(trained=True)), "trained writers;"),
        (run(whole[0], make_engine(system="Say it.")), "items, writer;"),
        (run(whole[0], count=2), "items;"),
    ):
        with pytest.raises(InputError, match=f"differs in {names}"):
            wrong.go()
    item = items()[0]
    for field in ({"answers": ("other",)}, {"group": "other"}, {"gold": (1,)}, {"question": "Other?"}):
        changed = [dataclasses.replace(item, **field), *items()[1:]]
        with pytest.raises(InputError, match="differs in items;"):
            Run(make_engine(), changed, CONFIG, whole[0]).go()


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda lines: [lines[0], b"{", *lines[2:]], "line 2 is damaged"),
        (lambda lines: [lines[0], b"[]", *lines[2:]], "line 2 is damaged"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "not the lines of this run in its order"),
        (lambda lines: [*lines, lines[-1]], "line 25 is damaged: item and method had a line before"),
        (lambda lines: [*lines, lines[-1].replace(b"item-2", b"item-3")], "not the lines of this run in its order"),
    ],
)
def test_damaged_lines_are_not_taken_for_results(
    whole: tuple[Path, Finished], tmp_path: Path, damage: Any, rule: str
) -> None:
    lines = (whole[0] / "lines.jsonl").read_bytes().splitlines()
    for name in ("items.jsonl", "run.json"):
        (tmp_path / name).write_bytes((whole[0] / name).read_bytes())
    (tmp_path / "lines.jsonl").write_bytes(b"".join(line + b"\n" for line in damage(lines)))
    with pytest.raises(IntegrityError, match=rule):
        run(tmp_path).go()


def test_items_of_another_run_are_not_taken_for_its_own(whole: tuple[Path, Finished], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((whole[0] / "run.json").read_bytes())
    with pytest.raises(IntegrityError, match=r"items\.jsonl is missing"):
        run(tmp_path).go()
    (tmp_path / "items.jsonl").write_bytes(b"".join((whole[0] / "items.jsonl").read_bytes().splitlines(True)[1:]))
    with pytest.raises(IntegrityError, match="not the items of this run"):
        run(tmp_path).go()
    (tmp_path / "run.json").unlink()
    (tmp_path / "lines.jsonl").write_bytes((whole[0] / "lines.jsonl").read_bytes())
    with pytest.raises(IntegrityError, match=r"run\.json is missing"):
        run(tmp_path).go()
    (tmp_path / "run.json").write_bytes(b"{}")
    with pytest.raises(IntegrityError, match=r"run\.json is damaged, or of another version: run"):
        run(tmp_path).go()


def test_a_method_that_fails_its_control_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = operator.place
    monkeypatch.setattr(operator, "place", lambda segment, at, tables, out: placed(segment, at + 1, tables, out))
    found = run(tmp_path, count=1).go()
    monkeypatch.undo()
    assert found.refused.keys() == {"none", "retrieved-document", "epic:k=3"}
    assert "self-transfer (KL" in found.refused["none"]
    assert [line["method"] for line in found.lines] == ["full", "no-context", "fewer-documents:1", "full-again"]
    # once refused, it stays so in this folder, whatever is loaded later
    assert run(tmp_path, count=1).go() == found


def test_a_model_that_fails_the_endpoints_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvquilt import endpoints

    placed = endpoints.place
    monkeypatch.setattr(endpoints, "place", lambda segment, at, tables, out: placed(segment, at + 1, tables, out))
    with pytest.raises(UnsupportedModelError, match="layer-0 keys"):
        run(tmp_path).go()
    assert not (tmp_path / "run.json").exists()


def test_a_method_that_cannot_run_on_a_prompt_says_so_in_its_line(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, methods=("cacheblend:1", "none"))
    found = run(tmp_path, config=config, count=1).go()
    line = by_arm(found, "item-0")["cacheblend:1"]
    assert "its probe alone costs" in line["refused"]
    assert line["answer"] is line["right"] is line["ledger"] is line["fidelity"] is None
    assert [each["refused"] for each in found.lines if each is not line] == [None] * 3
    assert run(tmp_path, config=config, count=1).go() == found


def test_a_silent_arm_has_fidelity_and_no_answer(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, methods=("none",), silent=("none",))
    line = by_arm(run(tmp_path, config=config, count=1).go(), "item-0")["none"]
    assert line["answer"] is line["score"] is line["right"] is line["scores"] is None
    assert line["fidelity"]["self"]["kl"]
    assert line["ledger"]["forward_tokens"]["decode"] == 0
    for wrong in ("full", "epic:k=3", "nine"):
        with pytest.raises(InputError):
            dataclasses.replace(config, silent=(wrong,))


def test_documents_are_in_memory_before_any_clock_starts(tmp_path: Path) -> None:
    with make_engine(directory=tmp_path / "store", trained=True) as engine:
        methods = ("none", "fusionrag:1000000", "cache-craft", "sempic", "link-tokens")
        found = run(tmp_path / "run", engine, dataclasses.replace(CONFIG, methods=methods), count=2).go()
        engine.store.clear_memory()
        again = run(tmp_path / "again", engine, dataclasses.replace(CONFIG, methods=methods), count=2).go()
    for line in (*found.lines, *again.lines):
        assert set(line["ledger"]["bytes_read"]) <= {"memory"}
        assert line["ledger"]["forward_tokens"]["compile"] == 0
        assert ("compile" in line["seconds"]) == (line["method"] in methods)
    compiled = by_arm(found, "item-0")
    assert compiled["none"]["seconds"]["compile"] > 0
    assert by_arm(again, "item-0")["none"]["seconds"]["compile"] == 0.0


@pytest.mark.parametrize("kept", [1, 7, 8, 13, 23])
def test_lines_of_an_item_that_is_not_whole_are_made_anew(
    whole: tuple[Path, Finished], tmp_path: Path, kept: int
) -> None:
    """What a power cut leaves while an item's lines are written."""
    for name in ("items.jsonl", "run.json"):
        (tmp_path / name).write_bytes((whole[0] / name).read_bytes())
    lines = (whole[0] / "lines.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "lines.jsonl").write_bytes(b"".join(lines[:kept]))
    assert timeless(run(tmp_path).go().lines) == timeless(whole[1].lines)
    assert len((tmp_path / "lines.jsonl").read_bytes().splitlines()) == len(ARMS) * 3


def test_arms_that_do_not_fit_into_memory_together_answer_as_if_they_did(
    whole: tuple[Path, Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sounding, "_AT_ONCE", 1)
    engine = make_engine()
    lent, most = engine.model.pool.lent, []
    found = run(tmp_path, engine).go(lambda progress: most.append(engine.model.pool.lent - lent))
    assert max(most) == 1
    for mine, other in zip(found.lines, whole[1].lines, strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["fidelity"]["gold"]["nll"] == pytest.approx(other["fidelity"]["gold"]["nll"], rel=1e-3, abs=1e-5)
        if mine["method"] != "full":
            assert mine["fidelity"]["self"]["kl"] == pytest.approx(other["fidelity"]["self"]["kl"], rel=2e-2, abs=1e-5)


def test_prompts_are_told_as_they_are_read(tmp_path: Path) -> None:
    seen: list[RunProgress] = []
    run(tmp_path, config=dataclasses.replace(CONFIG, methods=("none",)), count=3).go(seen.append)
    assert [each.method for each in seen] == ["full", "no-context", "none"] * 3
    assert {each.total for each in seen} == {9}
    assert [each.done for each in seen] == list(range(1, 10))
    assert [each.item for each in seen[::3]] == ["item-0", "item-1", "item-2"]


def test_what_cannot_be_run_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    engine = make_engine()
    with pytest.raises(InputError, match="items"):
        Run(engine, [], CONFIG, tmp_path).go()
    with pytest.raises(InputError, match="twice"):
        Run(engine, items(1) * 2, CONFIG, tmp_path).go()
    long = dataclasses.replace(items(1)[0], documents=tuple(documents(8, 4000)), id="long")
    with pytest.raises(ContextLengthError, match=r"items \(long\)"):
        Run(engine, [*items(1), long], CONFIG, tmp_path).go()
    with pytest.raises(InputError, match="new_tokens"):
        dataclasses.replace(CONFIG, new_tokens=0)
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    refused: list[InputError] = []

    def other(progress: RunProgress) -> None:
        if progress.done == 1:
            with pytest.raises(InputError, match="another process") as error:
                run(tmp_path, count=1).go()
            refused.append(error.value)

    run(tmp_path, count=1).go(other)
    assert len(refused) == 1


def test_about_is_kept_as_the_first_call_gives_it(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, methods=())
    run(tmp_path, config=config, count=1, about={"task": "topics"}).go()
    run(tmp_path, config=config, count=1, about={"task": "other"}).go()
    assert json.loads((tmp_path / "run.json").read_text())["about"] == {"task": "topics"}
