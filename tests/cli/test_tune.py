"""tune: a choice that auto uses, and how it is forgotten."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run

QUESTION = "What does the with statement do?"
pytestmark = pytest.mark.usefixtures("model")


def tune(run: Run, docs: Path, *more: object):
    few = ("--passage-tokens", 60, "--prompts", 6, "--methods", "none", "--out", docs.parent / "curve")
    return run("tune", "--docs", docs, *few, *more)


def asked(run: Run, docs: Path, *more: object) -> str:
    outcome = run("ask", "--docs", docs, QUESTION, "--max-new-tokens", 2, "--json", *more)
    assert outcome.code == 0, outcome.err
    return outcome.json["method"]


def test_auto_uses_the_choice_until_it_is_forgotten(run: Run, docs: Path) -> None:
    found = tune(run, docs, "--target", 0.0001)
    assert found.code == 0, found.err
    assert "`auto` uses none" in found.out
    assert (docs.parent / "curve" / "tune.json").exists()
    assert tune(run, docs, "--target", 0.0001, "--tenant", "other").code == 0
    assert asked(run, docs) == "none"
    forgotten = run("tune", "--forget")
    assert forgotten.code == 0, forgotten.err
    assert "Forgotten: none. `auto` goes by the gate." in forgotten.out
    assert asked(run, docs) == "full"
    assert asked(run, docs, "--tenant", "other") == "none"
    assert "Nothing was tuned for this model, tenant" in run("tune", "--forget").out
    other = run("tune", "--forget", "--tenant", "other", "--json")
    assert other.json == {"forgotten": True, "chosen": "none"}
    assert run("tune", "--forget", "--tenant", "other", "--json").json == {"forgotten": False, "chosen": None}


def test_a_tuning_without_a_choice_ends_with_6_and_can_be_forgotten(run: Run, docs: Path) -> None:
    outcome = tune(run, docs, "--target", 1)
    assert outcome.code == 6
    assert "No method reached 1" in outcome.out
    assert "a tuning without a choice" in run("tune", "--forget").out


@pytest.mark.parametrize("arguments", [[], ["--docs", ".", "--forget"]])
def test_documents_or_forget(run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQUILT_MODEL", "no-model-of-this-name")
    outcome = run("tune", *arguments)
    assert outcome.code == 2
    assert "give exactly one of --docs DIR, --forget" in outcome.err
