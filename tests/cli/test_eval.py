"""`kvquilt eval` on a tiny random model: a table, a folder, stopped and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from kvquilt.errors import InputError
from kvquilt.evaluation.preparing import Preparation
from kvquilt.evaluation.sounding import Sounder
from tests.cli.conftest import Run
from tests.evaluation.test_squad import article

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

    monkeypatch.setattr("kvquilt.evaluation.run_timing.first_tokens", small)
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
    ("task", "methods", "more", "says"),
    [
        ("biografy", "none", (), "did you mean 'biography'"),
        ("biography", "nine", (), "did you mean 'none'"),
        ("biography", ",", (), "name at least one"),
        ("biography", "none", ("--silent", "epic"), "must be among the methods"),
        ("biography", "sempic", (), "give its folder, --writer PATH"),
        ("biography", "oracle:none", (), "follows the retriever"),
    ],
)
def test_wrong_input_is_found_before_a_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, methods: str, more: tuple[str, ...], says: str
) -> None:
    monkeypatch.setenv("KVQUILT_MODEL", "no-model-of-this-name")
    outcome = run("eval", "--task", task, "--methods", methods, "--out", tmp_path / "run", *more)
    assert outcome.code == 2
    assert says in outcome.err


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
    assert (long.code, "new_tokens: no accepted answer of any item fits (got 3)" in long.err) == (2, True)
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
