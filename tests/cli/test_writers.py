"""compile, ask, doctor, tune with trained writers, from folders."""

from pathlib import Path

import pytest

from kvquilt.config import Settings
from kvquilt.model.load import load_model
from kvquilt.repair.presets import AUTO_ORDER
from tests.cli.conftest import Run
from tests.writers.trained import random_writer

QUESTION = "What does the with statement do?"


@pytest.fixture
def folders(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writers of the settings' model: a sempic one, another one, a joint one. The gate lets everything pass."""
    monkeypatch.setenv("KVQUILT_GATE_MAX_KL", "1000000")
    monkeypatch.setenv("KVQUILT_GATE_MIN_TOP1", "0")
    loaded = load_model(str(model), settings=Settings.resolve()[0])
    for name, kind, seed in (("sempic", "sempic", 1), ("other", "sempic", 2), ("joint", "joint", 3)):
        random_writer(loaded, kind, seed=seed).save(tmp_path / "writers" / name)
    return tmp_path / "writers"


def ask(run: Run, docs: Path, *more: object):
    return run("ask", "--docs", docs, QUESTION, "--max-new-tokens", 3, *more)


def test_a_writer_is_prepared_for_measured_and_taken_by_auto(run: Run, docs: Path, folders: Path) -> None:
    compiled = run("compile", docs, "--writer", folders / "sempic", "--gate-seconds", 0.1, "--json")
    assert compiled.code == 0, compiled.err
    verdicts = compiled.json["gate"]["verdicts"]
    assert [v["method"] for v in verdicts] == ["sempic", *AUTO_ORDER]
    assert verdicts[0]["trained"].startswith("sempic ")
    again = run("compile", docs, "--writer", folders / "sempic", "--gate-seconds", 0.1)
    assert "0 of 3 passages" in again.out
    assert f"sempic [{verdicts[0]['trained'].split()[1][:12]}]" in again.out
    assert "`auto` uses sempic." in again.out

    answer = ask(run, docs, "--writer", folders / "sempic", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["method"] == "sempic"
    assert answer.json["ledger"]["forward_tokens"]["compile"] == 0
    assert answer.json["ledger"]["writer"] in run("explain").out
    assert ask(run, docs, "--json").json["method"] == AUTO_ORDER[0], "without a writer nothing of it is expected"

    swapped = ask(run, docs, "--writer", folders / "other", "--json")
    assert (swapped.code, swapped.json["method"]) == (0, AUTO_ORDER[0])
    assert f"sempic: not measured; {AUTO_ORDER[0]} runs instead" in swapped.err


def test_writers_go_by_kind_or_by_name(run: Run, docs: Path, folders: Path) -> None:
    two = ("--writer", folders / "sempic", "--writer", f"law={folders / 'other'}", "--writer", folders / "joint")
    named = ask(run, docs, *two, "--method", "sempic:writer=law", "--json")
    assert named.code == 0, named.err
    assert named.json["ledger"]["writer"].endswith("(law)")
    packed = ask(run, docs, *two, "--method", "retrieved-document:5%,writer=joint", "--explain")
    assert packed.code == 0, packed.err
    assert f"+{len(run('explain', '--json').json['ledger']['documents']) * 5} soft rows" in packed.out
    assert (
        "two are called 'sempic'" in ask(run, docs, "--writer", folders / "sempic", "--writer", folders / "other").err
    )


def test_doctor_measures_the_writers_method_first(run: Run, docs: Path, folders: Path) -> None:
    outcome = run("doctor", "--docs", docs, "--prompts", 3, "--writer", f"law={folders / 'other'}", "--json")
    assert outcome.code == 0, outcome.err
    assert [v["method"] for v in outcome.json["verdicts"]] == ["sempic:writer=law", *AUTO_ORDER]


def test_tune_compares_the_writers_methods_and_its_choice_holds_for_these_writers(
    run: Run, docs: Path, folders: Path, tmp_path: Path
) -> None:
    writers = ("--writer", folders / "sempic", "--writer", f"law={folders / 'other'}")
    few = ("--docs", docs, "--passage-tokens", 60, "--prompts", 6, "--target", 0.0001, "--out", tmp_path / "curve")
    outcome = run("tune", *few, *writers, "--methods", "sempic:writer=law;epic:k=2,writer=sempic", "--json")
    assert outcome.code == 0, outcome.err
    assert {trial["method"] for trial in outcome.json["trials"]} == {"sempic:writer=law", "epic:k=2,writer=sempic"}
    assert outcome.json["chosen"] == "sempic:writer=law", "nothing is cheaper than the question alone"
    assert ask(run, docs, *writers, "--json").json["method"] == "sempic:writer=law"
    alone = ask(run, docs, "--writer", folders / "sempic", "--json").json
    assert alone["method"] == "full", "with other writers nothing was tuned, and nothing measured"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "sempic"], "sempic needs a trained writer of that kind: give its folder, --writer PATH"),
        (["--methods", "none;epic:writer=law", "--writer", "low=."], "did you mean 'low'"),
        (["--writer", "nowhere-at-all"], "no such folder"),
    ],
)
def test_tune_refuses_before_a_model_is_loaded(
    run: Run, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQUILT_MODEL", "no-model-of-this-name")
    outcome = run("tune", "--docs", ".", *arguments)
    assert outcome.code == 2
    assert said in outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "sempic"], "sempic needs a trained writer of that kind: give its folder, --writer PATH"),
        (["--method", "epic:writer=joint"], "needs a trained writer of that kind"),
        (["--method", "epic:writer=isolatd"], "did you mean 'isolated'"),
        (["--writer", "nowhere-at-all"], "no such folder"),
        (["--writer", "isolated=."], "is the name of a recipe"),
        (["--writer", "law=.", "--method", "sempic:writer=lew"], "did you mean 'law'"),
    ],
)
def test_what_cannot_be_right_is_refused_before_a_model_is_loaded(
    run: Run, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQUILT_MODEL", "no-model-of-this-name")
    outcome = run("ask", "--docs", ".", "q", *arguments)
    assert outcome.code == 2
    assert said in outcome.err


def test_a_folder_without_a_writer_is_an_error_of_its_own(run: Run, docs: Path, folders: Path) -> None:
    outcome = ask(run, docs, "--writer", docs, "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["type"] == "WriterError"
