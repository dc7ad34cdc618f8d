"""`kvquilt eval` on a tiny random model: a table, a folder, stopped and gone on with."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from filelock import FileLock

from kvquilt.errors import InputError
from kvquilt.evaluation.run.preparing import Preparation
from kvquilt.evaluation.run.sounding import Sounder
from kvquilt.files import held
from tests.cli.conftest import Run
from tests.evaluation.tasks.test_squad import article

METHODS = "none;epic:k=2,writer=isolated;fewer-documents:1"
ARMS = ["full", "no-context", "none", "epic:k=2,writer=isolated", "fewer-documents:1", "full-again"]


@pytest.fixture
def task(tmp_path: Path) -> str:
    """Three questions, each about documents of its own."""
    names = ("with", "while", "assert", "if", "pass", "break")
    rows = [
        {
            "id": f"q{n}",
            "documents": [{"id": name, "text": topics[name].strip()[:90]} for name in names[n::3]],
            "question": f"What does {names[n]} do?",
            "answers": ["It"],
            "gold": [0],
        }
        for n in range(3)
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return f"jsonl:{path},share=0"


def evaluate(run: Run, task: str, out: Path, *more: object) -> Any:
    return run("eval", "--task", task, "--methods", METHODS, "--out", out, "--new-tokens", 3, *more)


@pytest.mark.usefixtures("model")
def test_a_run_that_was_stopped_goes_on_and_is_told_in_tables(
    run: Run, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    made, calls = Sounder.lines, []

    def lines(self: Sounder, *arguments: Any) -> Any:
        *rest, told = arguments

        def tell(arm: Any) -> None:
            told(arm)
            calls.append(arm)
            if len(calls) == 10:  # within the second item
                raise KeyboardInterrupt

        return made(self, *rest, tell)

    with monkeypatch.context() as patch:
        patch.setattr(Sounder, "lines", lines)
        stopped = evaluate(run, task, out)
    assert stopped.code == 130
    assert "stopped; 6 of 18 lines are kept in" in stopped.err
    assert "The same command goes on from there." in stopped.err

    done = evaluate(run, task, out)
    assert done.code == 0, done.err
    assert "7 of 18 prompts" in done.err
    assert "18 of 18 prompts, 0:00 to go" in done.err
    assert "Split evaluation: 3 items. The documents do not clearly help" in done.out
    for title in ("How far from full prefill", "Answers (contains_em)", "Damage", "Work"):
        assert title in done.out
    assert "full-again (noise floor)" in done.out
    assert "Fewer than 30 questions in D carry no claim." in done.out
    assert "of full prefill's time against" in done.out

    assert "timing first tokens, prompt 1 of 1" in done.err
    assert "First token: measured, 5 repeats on a prompt of median length" in done.out
    assert "Group by group (contains_em)" in done.out

    again = evaluate(run, task, out, "--json", "--timed", 2)
    assert "timing first tokens, prompt 2 of 2" in again.err
    assert "prompt 1 of" not in again.err, "what is there is not timed again"
    again = again.json
    assert again["prefix_hit"]["repeats"] == 10
    assert [arm["method"] for arm in again["arms"]] == ARMS
    assert again["items"] == 3
    about = json.loads((out / "run.json").read_text())["about"]
    assert about["task"] == "jsonl:own.jsonl,share=0"
    assert {"command", "commit", "machine", "split", "seed", "dtype"} <= about.keys()
    assert str(tmp_path) not in (out / "items.jsonl").read_text() + json.dumps(about["writers"])
    texts = [json.loads(each) for each in (out / "texts.jsonl").read_text().splitlines()]
    assert [each["question"] for each in texts] == [f"What does {name} do?" for name in ("with", "while", "assert")]

    other = evaluate(run, task, out, "--limit", 2)
    assert other.code == 2
    assert "it differs in items; choose another folder" in other.err


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(("items", "kept"), [(1, 6), (2, 12)])
def test_what_is_kept_is_what_is_on_disk_wherever_it_stops(
    run: Run, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: int, kept: int
) -> None:
    """Between two items, too: the next one has not been heard of then."""
    begin, begun = Preparation.of, []

    def of(self: Preparation, given: Any) -> Any:
        begun.append(given)
        if len(begun) > items:
            raise KeyboardInterrupt
        return begin(self, given)

    monkeypatch.setattr(Preparation, "of", of)
    stopped = evaluate(run, task, tmp_path / "run")
    assert f"stopped; {kept} of 18 lines are kept in" in stopped.err
    with (tmp_path / "run" / "lines.jsonl").open("a") as out:
        out.write('{"item": "q')  # half a line is none
    begun.clear()
    monkeypatch.setattr(Preparation, "of", begin)
    assert f"{kept + 1} of 18 prompts" in evaluate(run, task, tmp_path / "run").err


@pytest.mark.usefixtures("model")
def test_lines_are_told_where_nothing_is_timed(
    run: Run, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untimed = evaluate(run, task, tmp_path / "run", "--timed", 0)
    assert untimed.code == 0, untimed.err
    assert "First token: single readings that nothing warmed up" in untimed.out
    assert not (tmp_path / "run" / "timing.json").exists()

    def small(*arguments: Any) -> Any:
        raise InputError("memory_bytes", "none read from disk; the memory tier must hold the documents", 0)

    monkeypatch.setattr("kvquilt.evaluation.run.in_turns.first_tokens", small)
    failed = evaluate(run, task, tmp_path / "run")
    assert failed.code == 0
    assert "first tokens were not timed: memory_bytes: none read from disk" in failed.err
    assert "First token: single readings that nothing warmed up" in failed.out


@pytest.mark.usefixtures("model")
def test_a_method_that_fails_its_control_is_named_and_ends_with_6(
    run: Run, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvquilt.repair import operator

    placed = operator.place
    monkeypatch.setattr(operator, "place", lambda segment, at, tables, out: placed(segment, at + 1, tables, out))
    done = run("eval", "--task", task, "--methods", "none", "--out", tmp_path / "run", "--limit", 1, "--new-tokens", 3)
    assert done.code == 6
    assert "Not measured: none: it must equal full prefill, and does not" in done.out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--task", "biografy"), "--task: unknown task; did you mean 'biography'"),
        (("--task", "biography:people=0"), "--task: people: must be an integer from 20"),
        (("--task", "jsonl:none.jsonl"), "--task: path: the file cannot be read"),
        (("--task", "jsonl:"), "--task: needs a file"),
        (("--methods", "nine"), "--methods: unknown method 'nine'; did you mean 'none'"),
        (("--methods", ","), "--methods: name at least one"),
        (("--methods", "epic:k=-1"), "--methods: k: must be at least 1"),
        (("--methods", "random:seed=x"), "--methods: seed must be a number"),
        (("--methods", "oracle:none"), "follows the retriever"),
        (("--methods", "sempic"), "--writer: sempic needs a trained writer of that kind: give its folder"),
        (("--methods", "sempic:nowhere"), "--writer: no such folder (got 'nowhere')"),
        (("--methods", "cacheclip"), "--helper-model"),
        (("--writer", "nowhere"), "--writer: no such folder"),
        (("--silent", "nine"), "--silent: unknown method 'nine'"),
        (("--silent", "epic"), "--silent: must be among the methods"),
        (("--silent", "full"), "--silent: full prefill's answer"),
        (("--split", "tunning"), "--split: must be one of"),
        (("--out", __file__), "--out: must be a folder"),
    ],
)
def test_wrong_input_is_found_before_a_model_is_loaded_and_told_by_its_option(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], says: str
) -> None:
    monkeypatch.setenv("KVQUILT_MODEL", "no-model-of-this-name")
    asked = ("--task", "biography", "--methods", "none", "--out", tmp_path / "run")
    verbs = [("eval",), ("study", "attention")]
    for verb in verbs if given[0] != "--silent" and "follows" not in says else verbs[:1]:
        outcome = run(*verb, *asked, *given)
        assert outcome.code == 2
        assert says in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", [("eval", "--task", "biography"), ("study", "attention", "--task", "biography"),
                                  ("study", "repair-budget")])  # fmt: skip
def test_a_folder_that_another_process_writes_or_nobody_can_is_refused_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    monkeypatch.setenv("KVQUILT_MODEL", "no-model-of-this-name")
    more = () if verb[1] == "repair-budget" else ("--methods", "none")
    with held(tmp_path / "run", "folder", "writes into"):
        second = run(*verb, *more, "--out", tmp_path / "run")
    assert second.code == 2
    assert "--out: another process writes into this folder" in second.err
    assert run(*verb, *more, "--out", tmp_path / "run").code == 3, "the model is what is missing now"

    def refused(self: FileLock, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(FileLock, "acquire", refused)
    sealed = run(*verb, *more, "--out", tmp_path / "run")
    assert sealed.code == 4
    assert "run cannot be written: Read-only file system" in sealed.err


@pytest.mark.usefixtures("model")
def test_a_disk_that_is_full_is_told_and_the_run_goes_on_when_it_is_not(
    run: Run, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, lines, written = os.fsync, tmp_path / "run" / "lines.jsonl", []

    def full(descriptor: int) -> None:
        if lines.exists() and os.path.samestat(os.fstat(descriptor), lines.stat()):
            written.append(descriptor)
        if len(written) == 9:  # in the middle of an item's lines
            written.append(descriptor)
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    stopped = evaluate(run, task, tmp_path / "run")
    assert stopped.code == 4
    assert "lines.jsonl cannot be written: No space left on device" in stopped.err
    assert 6 < len(lines.read_text().splitlines()) < 12
    done = evaluate(run, task, tmp_path / "run")
    assert done.code == 0, done.err
    assert "7 of 18 prompts" in done.err
    assert len(lines.read_text().splitlines()) == 18


@pytest.mark.usefixtures("model")
def test_halves_of_sixteen_bits(run: Run, task: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = evaluate(run, task, out, "--dtype", "float16", "--limit", 1, "--timed", 0)
    assert done.code == 0, done.err
    arms = run("eval", "--task", task, "--methods", METHODS, "--out", out, "--new-tokens", 3, "--dtype", "float16",
               "--limit", 1, "--timed", 0, "--json").json["arms"]  # fmt: skip
    kl = {arm["method"]: arm["fidelity"]["kl"]["value"] for arm in arms if arm["fidelity"]}
    assert kl["full-again"] < 1e-3 < kl["no-context"]
    other = evaluate(run, task, out, "--limit", 1, "--timed", 0)
    assert "it differs in model" in other.err


@pytest.mark.usefixtures("model")
def test_items_that_nothing_can_answer_and_splits_that_are_empty_are_refused(
    run: Run, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    short = run("eval", "--task", task, "--methods", "none", "--out", tmp_path / "a", "--split", "tuning")
    assert (short.code, "has nothing in it" in short.err) == (2, True)
    rows = Path(task.removeprefix("jsonl:").removesuffix(",share=0"))
    some = rows.read_text().replace('"It"', '"a rather long answer to it"', 2)
    rows.write_text(some, encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(Sounder, "lines", interrupted)
        warned = evaluate(run, task, tmp_path / "c")
    assert "2 of 3 items have no accepted answer that fits into 3 tokens, q0 the first of them" in warned.err
    assert "stopped; what is finished is kept in" in warned.err
    rows.write_text(some.replace('"It"', '"a rather long answer to it"'), encoding="utf-8")
    long = evaluate(run, task, tmp_path / "b")
    assert (long.code, "--new-tokens: no accepted answer of any item fits (got 3)" in long.err) == (2, True)
    assert not (tmp_path / "b" / "run.json").exists()


@pytest.mark.usefixtures("model")
def test_what_a_file_holds_and_no_item_has_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    articles = [article("Avia", 2, 1), article("Bora", 2, 1)]
    articles[1]["paragraphs"][0]["qas"][0]["answers"] = []
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": articles}), encoding="utf-8")
    monkeypatch.setattr(Sounder, "lines", interrupted)
    stopped = run("eval", "--task", f"squad:{path}", "--methods", "none", "--out", tmp_path / "run")
    assert "left out, unanswerable: 1" in stopped.err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["about"]["skipped"] == {"unanswerable": 1}
