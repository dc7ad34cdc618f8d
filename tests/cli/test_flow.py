"""compile, ask, explain, doctor, store on a tiny random model, whole."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from kvquilt import Document, bench
from kvquilt.answer import Stream
from kvquilt.cli import demo
from kvquilt.engine import Engine
from kvquilt.ledger import Provenance
from kvquilt.repair.presets import METHODS
from kvquilt.store import files
from tests.cli.conftest import Run

QUESTION = "What does the with statement do?"
pytestmark = pytest.mark.usefixtures("model")


def ask(run: Run, docs: Path, *more: object):
    return run("ask", "--docs", docs, QUESTION, "--max-new-tokens", 4, *more)


def test_compile_stores_once_and_counts_what_it_skipped(run: Run, docs: Path, tmp_path: Path) -> None:
    first = run("compile", docs, "--no-gate", "--json")
    assert first.code == 0, first.err
    assert first.json["compiled"] == first.json["documents"] == 3
    assert first.json["skipped"] == [{"path": "bad.txt", "reason": first.json["skipped"][0]["reason"]}]
    assert "UTF-8" in first.json["skipped"][0]["reason"]
    assert "skipped bad.txt" in first.err
    again = run("compile", docs, "--no-gate", "--json")
    assert (again.json["compiled"], again.json["stored_before"]) == (0, 3)
    tiers = run("store", "stats", "--json").json
    assert tiers["disk"]["segments"] == 3
    assert tiers["disk"]["bytes"] > 0
    assert tiers["memory"]["segments"] == tiers["memory"]["bytes"] == 0


def test_ask_names_its_passages_and_explains(run: Run, docs: Path) -> None:
    plain = ask(run, docs, "--method", "none", "--explain")
    assert plain.code == 0, plain.err
    assert "with.txt#1" in plain.out
    assert "not recomputed" in plain.out
    answer = ask(run, docs, "--method", "none", "--json")
    assert answer.code == 0
    assert {*answer.json["ledger"]["tokens"]} == {*Provenance}
    assert answer.json["ledger"]["tokens"]["reused"] > 0
    assert answer.json["method"] == "none"
    assert answer.json["passages"][0]["id"] == "with.txt#1"
    assert plain.out.startswith(answer.json["text"])


def test_explain_shows_the_last_answer_without_any_text(run: Run, docs: Path, tmp_path: Path) -> None:
    answer = ask(run, docs, "--method", "none", "--json").json
    kept = run("explain", "--json")
    assert kept.json["ledger"] == answer["ledger"]
    assert "with.txt#1" in run("explain").out
    written = (tmp_path / "cache" / "last-answer.json").read_text(encoding="utf-8")
    assert QUESTION not in written
    assert "statement" not in written


def test_explain_before_any_answer_says_what_to_do(run: Run) -> None:
    outcome = run("explain")
    assert outcome.code == 2
    assert "kvquilt ask" in outcome.err


def test_a_budget_is_kept_to_and_what_was_spent_is_shown(run: Run, docs: Path) -> None:
    outcome = ask(run, docs, "--method", "retrieved-document", "--budget", "5%", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["method"] == "retrieved-document:5%"
    spent = outcome.json["spending"]
    assert 0 < spent["charged"] <= spent["allowed"] == int(0.05 * spent["tokens"] * spent["layers"])
    assert spent["charged"] == spent["probe"] + spent["repair"]
    assert spent["charged_share"] == spent["charged"] / (spent["tokens"] * spent["layers"])
    explained = ask(run, docs, "--method", "retrieved-document:5%", "--explain")
    assert f"charged {spent['charged']} token-layers of {spent['allowed']} allowed" in explained.out
    assert run("explain", "--json").json["spending"] == spent


def test_the_budget_of_the_settings_is_for_methods_that_take_one(
    run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQUILT_BUDGET", "5%")
    ran = {name: ask(run, docs, "--method", name, "--json").json["method"] for name in ("full", "none", "none:7%")}
    assert ran == {"full": "full", "none": "none:5%", "none:7%": "none:7%"}
    assert ask(run, docs, "--method", "none", "--budget", "9%", "--json").json["method"] == "none:9%"
    assert ask(run, docs, "--json").json["method"] == "full", "auto without a verdict"


def test_a_helper_model_is_loaded_beside_the_model_and_its_work_is_charged(run: Run, docs: Path, model: Path) -> None:
    clip = ("--method", "cacheclip", "--helper-model", model, "--json")
    outcome = ask(run, docs, *clip, "--budget", "100000")
    assert outcome.code == 0, outcome.err
    assert outcome.json["spending"]["probe"] > 0
    for budget in ("1", "1%", "0"):
        outcome = ask(run, docs, *clip, "--budget", budget)
        assert outcome.code == 2
        error = outcome.json["error"]
        assert (error["type"], error["field"]) == ("InputError", "budget")
        assert re.search(r"the least possible is \d+", error["rule"])
    assert ask(run, docs, "--method", "cacheclip", "--helper-model", docs / "nothing-here").code == 3
    report = run("doctor", "--docs", docs, "--prompts", 3, "--methods", "cacheclip:100000", "--helper-model", model)
    assert "cacheclip:100000" in report.out


def test_methods_are_listed_with_their_parts(run: Run) -> None:
    rows = run("methods", "--json").json
    assert [row["name"] for row in rows] == list(METHODS)
    for row in rows:
        method = METHODS[row["name"]]
        assert {"writer", "order", "selector", "budget", "summary"} <= set(row)
        assert row["budget"] == (None if method.budget is None else str(method.budget))
        parts = {**_fields(method.selector), **_fields(method.correction)}
        assert all(parts[name] == value for name, value in row["options"].items())
    table = run("methods").out.splitlines()
    assert [line.split()[0] for line in table[1:]] == list(METHODS)


def _fields(part: object) -> dict[str, object]:
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return {}
    return dict(json.loads(json.dumps(dataclasses.asdict(part))))


def test_full_prefill_reuses_nothing(run: Run, docs: Path) -> None:
    assert ask(run, docs, "--method", "full", "--json").json["ledger"]["tokens"]["reused"] == 0


def test_doctor_reports_checks_and_verdicts_and_its_exit_code(run: Run, docs: Path, model: Path) -> None:
    outcome = run("doctor", model, "--docs", docs, "--prompts", 3, "--json")
    assert {"checks", "verdicts"} <= {*outcome.json}
    assert all(check["passed"] for check in outcome.json["checks"])
    passed = any(verdict["passed"] for verdict in outcome.json["verdicts"])
    assert outcome.code == (0 if passed else 6)
    assert "mean KL" in run("doctor", model, "--docs", docs, "--prompts", 3).out


def test_doctor_measures_the_methods_that_are_named(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQUILT_GATE_MAX_KL", "1000")
    monkeypatch.setenv("KVQUILT_GATE_MIN_TOP1", "0")
    named = "none:5%,retrieved-document:part=head,5%"
    outcome = run("doctor", "--docs", docs, "--prompts", 3, "--methods", named, "--json")
    assert outcome.code == 0, outcome.err
    assert [v["method"] for v in outcome.json["verdicts"]] == ["none:5%", "retrieved-document:part=head,5%"]
    shown = run("doctor", "--docs", docs, "--prompts", 3, "--methods", "none")
    assert "charged" in shown.out
    assert "retrieved-document:part=head,5%" in shown.out, "measured earlier, and still obeyed"
    assert "`auto` uses none" in shown.out
    monkeypatch.setenv("KVQUILT_GATE_MAX_KL", "1e-9")
    assert run("doctor", "--docs", docs, "--prompts", 3, "--methods", "none").code == 6


@pytest.mark.parametrize(("limits", "code"), [(("1000", "0"), 0), (("1e-9", "1"), 6)])
def test_auto_obeys_the_gate_and_says_so(
    run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[str, str], code: int
) -> None:
    monkeypatch.setenv("KVQUILT_GATE_MAX_KL", limits[0])
    monkeypatch.setenv("KVQUILT_GATE_MIN_TOP1", limits[1])
    assert run("compile", docs, "--gate-seconds", 0.1).code == 0
    assert run("doctor", "--docs", docs, "--prompts", 3).code == code
    outcome = ask(run, docs, "--json")
    assert outcome.code == 0
    assert outcome.json["method"] == ("retrieved-document" if code == 0 else "full")
    assert ("gate_refused" in outcome.err) == (code == 6)


def test_a_named_method_that_the_gate_refuses_ends_with_its_own_code(run: Run, docs: Path) -> None:
    outcome = ask(run, docs, "--method", "none", "--policy", "auto", "--json")
    assert outcome.code == 5
    assert outcome.json["method"] == "full"
    assert outcome.json["text"] is not None
    assert "no_verdict" in outcome.err


def test_tenants_do_not_share_segments(run: Run, docs: Path) -> None:
    run("compile", docs, "--no-gate", "--tenant", "a")
    assert run("compile", docs, "--no-gate", "--tenant", "b", "--json").json["stored_before"] == 0
    assert len(run("store", "ls", "--json").json) == 6
    assert len(run("store", "ls", "--tenant", "a", "--json").json) == 3
    assert run("store", "rm", "--tenant", "a", "--json").json == {"removed": 3}
    assert len(run("store", "ls", "--json").json) == 3


def test_store_rm_takes_keys_and_unmistakable_beginnings(run: Run, docs: Path) -> None:
    run("compile", docs, "--no-gate")
    keys = [row["key"] for row in run("store", "ls", "--json").json]
    assert run("store", "rm", keys[0]).code == 0
    assert run("store", "rm", keys[1].partition("/")[2][:16]).code == 0
    assert run("store", "rm", keys[0]).code == 2
    assert run("store", "rm").code == 2
    assert run("store", "rm", "--all", "--json").json == {"removed": 1}
    assert run("store", "gc", "--json").code == 0


def test_store_verify_finds_damage_and_repairs_it(run: Run, docs: Path, tmp_path: Path) -> None:
    run("compile", docs, "--no-gate")
    assert run("store", "verify").code == 0
    victim = sorted((tmp_path / "store").rglob("*.safetensors"))[0]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    found = run("store", "verify", "--json")
    assert found.code == 4
    assert len(found.json["damaged"]) == 1
    assert run("store", "verify", "--repair", "--json").json["removed"] == 1
    assert run("store", "verify").code == 0
    assert run("compile", docs, "--no-gate", "--json").json["compiled"] == 1


def test_a_store_that_cannot_be_written_is_an_error_of_compile_and_not_of_ask(
    run: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("store", "stats")
    store, access = str(tmp_path / "store"), os.access
    monkeypatch.setattr(
        files.os, "access", lambda path, *more, **named: store not in str(path) and access(path, *more, **named)
    )
    outcome = run("compile", docs, "--no-gate")
    assert outcome.code == 4
    assert "could not be stored" in outcome.err
    assert ask(run, docs, "--method", "none").code == 0


def test_a_store_that_is_a_file_is_named(run: Run, docs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = run("--store-dir", tmp_path / "file", "compile", docs, "--json")
    assert outcome.code == 4
    assert outcome.json["error"]["type"] == "StoreUnavailableError"
    assert re.search("kvquilt: error: .*file", outcome.err)


def test_an_interrupted_compile_keeps_what_is_finished(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Engine, *rest: object, **named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "doctor", interrupted)
        outcome = run("compile", docs)
    assert outcome.code == 130
    assert "interrupted" in outcome.err
    assert run("compile", docs, "--no-gate", "--json").json["stored_before"] == 3


def test_an_interrupted_answer_ends_with_130(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Stream) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "__next__", interrupted)
    assert ask(run, docs, "--method", "none").code == 130


def test_models_check_prints_the_capability_row(run: Run, model: Path) -> None:
    outcome = run("models", "check", model, "--json")
    assert outcome.code == 0
    assert outcome.json["reusable"] is True
    assert outcome.json["rope"] == ["default"]


def test_bench_writes_what_was_measured_and_passes_its_plan_on(
    run: Run, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []

    def measured(plan: bench.TtftPlan, *rest: object, **named: object) -> dict[str, object]:
        plans.append(plan)
        return {"full_ms": 10.0, "plan": {}, "ratios": {"full / reuse_memory": 5.0}}

    monkeypatch.setattr(bench, "run_ttft", measured)
    out = tmp_path / "results" / "ttft.json"
    outcome = run("bench", "ttft", "--context-tokens", 512, "--documents", 4, "--json", out)
    assert outcome.code == 0
    assert "full / reuse_memory" in outcome.out
    assert json.loads(out.read_text()) == run("bench", "ttft", "--json", "-").json
    assert (plans[0].model, plans[0].context_tokens, plans[0].documents) == (str(model), 512, 4)
    assert run("bench", "ttft", "--context-tokens", 1).code == 2


@pytest.mark.parametrize("out", ["file/ttft.json", "file/below/ttft.json", "."])
def test_bench_refuses_an_output_it_cannot_write_before_it_measures(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    def measured(*rest: object, **named: object) -> None:
        raise AssertionError("measured for nothing")

    monkeypatch.setattr(bench, "run_ttft", measured)
    (tmp_path / "file").write_text("")
    outcome = run("bench", "ttft", "--json", tmp_path / out)
    assert outcome.code == 2
    assert "--json" in outcome.err


def test_a_fallback_is_shown_once(run: Run, docs: Path) -> None:
    outcome = ask(run, docs, "--method", "none", "--policy", "auto")
    assert outcome.code == 5
    assert outcome.err.count("no_verdict") == 1


def test_demo_calls_only_its_own_model_weak(run: Run, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    few = [Document(document.text[:60], id=document.id) for document in demo.demo_documents()]
    monkeypatch.setattr(demo, "demo_documents", lambda: few)
    monkeypatch.setattr(demo, "_ANSWER_TOKENS", 2)
    monkeypatch.setenv("KVQUILT_GATE_SECONDS", "0.1")
    outcome = run("demo")
    assert outcome.code == 0, outcome.err
    assert "Time to the first token" in outcome.out
    assert "SmolLM2" not in outcome.out
