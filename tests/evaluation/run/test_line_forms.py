"""A run's folder with any field gone or of another form: damage that is named, or a report; never anything else."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from kvquilt.errors import InputError, IntegrityError, StoreUnavailableError
from kvquilt.evaluation.figures.summarising import summarise
from kvquilt.evaluation.report import told
from kvquilt.evaluation.report.writing import write
from kvquilt.evaluation.run import ledger_form
from kvquilt.evaluation.run.line_forms import check_lines
from kvquilt.evaluation.run.run import read_finished
from kvquilt.evaluation.run.timed_prompt import TimedPrompt, read_timing, write_timing
from kvquilt.evaluation.run.timing import Timing
from kvquilt.ledger import DocumentUse, Fallback, Ledger, Provenance, Spending
from tests.evaluation.report.test_parts import ABOUT
from tests.evaluation.report.test_report import ARMS, folder, line
from tests.evaluation.run.test_broken_files import MISSING, changed, places

STRANGE = [MISSING, None, -1, float("nan"), float("inf"), "x", [], {"a": 1}, [None]]
FILES = [("run.json", 0), ("items.jsonl", 1), ("texts.jsonl", 0), ("lines.jsonl", 0), ("lines.jsonl", 3)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(told, "summarise", functools.partial(summarise, resamples=20))
    made = folder(tmp_path / "run", items=2)
    times = Timing((1.0,) * 2, (1.0,) * 2)
    write_timing(made, [TimedPrompt("item-1", 90, dict.fromkeys((*ARMS, "prefix-hit"), times), {"none": 3.0}, ABOUT)])
    return made


@pytest.mark.parametrize(("name", "which"), [*FILES, ("timing.json", 0)])
def test_damage_is_named_or_does_not_matter(run: Path, name: str, which: int) -> None:
    path = run / name
    whole = path.read_text()
    rows = whole.splitlines() if name.endswith("l") else [whole]
    good, named = json.loads(rows[which]), 0
    for at in places(good):
        for new in STRANGE:
            text = json.dumps(changed(good, at, new))
            path.write_text("".join(f"{each}\n" for each in [*rows[:which], text, *rows[which + 1 :]]))
            try:
                write([run], run)
            except (InputError, IntegrityError) as error:
                named += str(run) in str(error)
    assert named > 20


@pytest.mark.parametrize("name", ["run.json", "items.jsonl", "texts.jsonl", "lines.jsonl", "timing.json"])
def test_what_is_no_json_or_no_file_is_damage_too(run: Path, name: str) -> None:
    path = run / name
    for raw in (b"\xff\xfe\xff\n", b"\0\n", b"[" * 100_000 + b"\n", b"1" * 5000 + b"\n", b"null\n"):
        path.write_bytes(raw)
        with pytest.raises(IntegrityError, match=name):
            write([run], run)
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreUnavailableError, match=f"{name} cannot be read"):
        write([run], run)


def test_messages_quote_no_answer_and_name_the_field(run: Path) -> None:
    lines = [line(arm, 0) for arm in ARMS]
    lines[2]["score"] = "a secret answer"
    with pytest.raises(IntegrityError) as damaged:
        check_lines(run / "lines.jsonl", lines)
    assert str(damaged.value).endswith("lines.jsonl: line 3 is damaged, or of another version: score")
    lines[2] = line("none", 0) | {"right": None}
    with pytest.raises(IntegrityError, match="line 3"):
        check_lines(run / "lines.jsonl", lines)
    lines[2] = line("none", 0) | dict.fromkeys(("answer", "score", "right", "scores"))
    check_lines(run / "lines.jsonl", lines)


def test_a_line_that_comes_twice_is_damage(run: Path) -> None:
    lines = [line(arm, n) for n in range(2) for arm in ARMS]
    with pytest.raises(IntegrityError, match="line 14 is damaged: item and method had a line before"):
        check_lines(run / "lines.jsonl", [*lines, line("epic:k=9", 0), lines[3]])


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_times_that_no_clock_gives_are_damage(run: Path, seconds: float) -> None:
    stored = json.loads((run / "timing.json").read_text())
    for at in (("arms", "none", "wall", 1), ("arms", "full", "processor", 0), ("compile", "none")):
        (run / "timing.json").write_text(json.dumps(changed(stored, ("prompts", 0, *at), seconds)))
        with pytest.raises(IntegrityError, match="not the times of a run"):
            read_timing(run)


def test_a_clock_that_stood_still_is_no_damage(run: Path) -> None:
    stored = json.loads((run / "timing.json").read_text())
    for arm in stored["prompts"][0]["arms"].values():
        arm["processor"] = [0.0, 0.0]
    (run / "timing.json").write_text(json.dumps(stored))
    assert read_timing(run)[0].arms["none"].processor == (0.0, 0.0)
    write([run], run)
    assert len(read_finished(run).lines) == 2 * len(ARMS)


def test_forms_are_those_of_the_ledger() -> None:
    """What a ledger gets more, a line may have more."""
    ledger = Ledger(
        documents=[DocumentUse("d", 1, 0, Provenance.REUSED, "memory", "why")],
        fallbacks=[Fallback("not_prepared", "why")],
        spending=Spending(1, 1, None, 0, 0, 0),
    )
    kept = ledger.as_dict()
    assert ledger_form.LedgerForm.model_fields.keys() == kept.keys() - {"seconds"}, "these are the line's own"
    for form, of in (
        (ledger_form._Use, kept["documents"][0]),
        (ledger_form._Fallback, kept["fallbacks"][0]),
        (ledger_form._Spending, kept["spending"]),
        (ledger_form._Tokens, kept["tokens"]),
    ):
        assert form.model_fields.keys() == of.keys()
