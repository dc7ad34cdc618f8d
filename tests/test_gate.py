"""The gate: a healthy model passes, a wrong rotation does not, and the engine obeys what was measured."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquilt import Document, Engine, Store
from kvquilt.endpoints import Check
from kvquilt.errors import InputError
from kvquilt.gate import note_name
from kvquilt.gate_report import DoctorReport, Verdict
from kvquilt.identity import namespace
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rope import RotaryTable
from tests.engines import QUESTION, SETTINGS, at_rest, documents, make_engine
from tests.models import FAMILIES, build, tiny
from tests.test_capability import WRONG
from tests.tokenizers import chatml_tokenizer

LENIENT = SETTINGS.model_copy(update={"gate_max_kl": 1e9, "gate_min_top1": 0.0})
STRICT = SETTINGS.model_copy(update={"gate_max_kl": 1e-9, "gate_min_top1": 1.0})


def planted(family: str, fault: str) -> LanguageModel:
    """A model whose table breaks after the probe at wrap has passed."""
    model = LanguageModel.wrap(build(family), chatml_tokenizer(), f"broken-{family}", fault)
    tables = tuple(WRONG[fault](t) if t is not None else None for t in model.capability.tables)
    model.capability = dataclasses.replace(model.capability, tables=tables)
    return model


def report_of(engine: Engine, *verdicts: tuple[str, bool], healthy: bool = True, **changes: Any) -> DoctorReport:
    return dataclasses.replace(
        DoctorReport(
            model=engine.model.name,
            fingerprint=engine.model.fingerprint.digest,
            writer=engine.writer.digest,
            checks=(Check("shifted", healthy, 0.5, 0.1),),
            verdicts=tuple(
                Verdict(n, ok, 0.01 if ok else 9.0, 0.02, 0.95, 3, 12, 99, "" if ok else "far", 0.05)
                for n, ok in verdicts
            ),
            max_kl=0.1,
            min_top1=0.9,
            seconds=1.0,
        ),
        **changes,
    )


def decided(engine: Engine, *verdicts: tuple[str, bool], tenant: str | None = None, healthy: bool = True) -> Engine:
    report = report_of(engine, *verdicts, healthy=healthy)
    engine.store.write_note(namespace(tenant), note_name(engine), report.as_dict())
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_model_passes_every_endpoint_check(family: str) -> None:
    engine = make_engine(family, settings=LENIENT)
    report = engine.doctor(documents(3), prompts=3)
    assert report.healthy, report.checks
    assert {v.method for v in report.verdicts} == {"none", "retrieved-document"}
    assert all(v.passed and v.prompts == 3 and v.tokens >= 3 and v.reused and v.mean_kl >= 0 for v in report.verdicts)
    at_rest(engine, conversations=0, lent=engine.model.pool.lent)
    engine.close()


FAULTS = [(fault, family) for fault in ("theta", "halves") for family in ("llama", "gemma3", "llama-yarn")]


@pytest.mark.parametrize(("fault", "family"), [*FAULTS, ("scaling", "llama-yarn")])
def test_a_wrong_rotation_fails_the_gate_and_auto_answers_like_full_prefill(fault: str, family: str) -> None:
    healthy, broken = make_engine(family), make_engine(planted(family, fault), settings=LENIENT)
    docs = documents()
    report = broken.doctor(docs, prompts=3)
    assert not report.healthy
    assert not any(v.passed for v in report.verdicts)
    assert "layer-0 keys and values of a moved document" in [c.name for c in report.checks if not c.passed]
    truth = healthy.ask(QUESTION, docs, method="full")
    answer = broken.ask(QUESTION, docs)
    assert answer.token_ids == truth.token_ids
    assert (answer.ledger.method, answer.ledger.asked) == ("full", "auto")
    [fallback] = answer.ledger.fallbacks
    assert fallback.reason == "unhealthy_model"
    assert "layer-0 keys" in fallback.detail
    wrong = broken.ask(QUESTION, docs, method="none")
    right = healthy.ask(QUESTION, docs, method="none")
    if family != "gemma3":  # whose windows hide most documents from the question
        assert wrong.token_ids != right.token_ids, "the fault has no effect, so nothing was tested"
    for engine in (healthy, broken):
        engine.close()


def test_a_failed_check_survives_the_store(tmp_path: Path) -> None:
    """Figures that do not exist (no prompt was measured) are stored and read back as such."""
    model = planted("llama", "halves")
    with make_engine(model, tmp_path) as engine:
        engine.doctor(documents(2))
    with make_engine(model, tmp_path) as engine:
        report = engine.verdict()
        assert report is not None
        assert not report.healthy
        assert all(math.isnan(v.mean_kl) and v.prompts == 0 for v in report.verdicts)
        assert engine.ask(QUESTION, documents()).ledger.fallbacks[0].reason == "unhealthy_model"


def test_nan_inside_a_check_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel.wrap(build("llama"), chatml_tokenizer(), "broken", "nan")
    engine = make_engine(model)
    rotate = RotaryTable.rotate

    def broken(self: RotaryTable, keys: torch.Tensor, delta: int, out: torch.Tensor) -> None:
        rotate(self, keys, delta, out)
        out[..., 0] = float("nan")

    monkeypatch.setattr(RotaryTable, "rotate", broken)
    report = engine.doctor(documents(3), prompts=3)
    assert not report.healthy
    assert engine.ask(QUESTION, documents()).ledger.method == "full"
    engine.close()
    assert model.pool.lent == 0


def test_a_verdict_is_found_again_after_a_restart_and_only_there(tmp_path: Path) -> None:
    with make_engine("llama", tmp_path, settings=LENIENT) as engine:
        assert engine.verdict() is None
        report = engine.doctor(documents(3), prompts=3)
        assert engine.verdict() == report
        assert engine.verdict("acme") is None
    with make_engine("llama", tmp_path) as engine:
        assert engine.verdict() == report
    half = LanguageModel.wrap(build("llama").bfloat16(), chatml_tokenizer(), "tiny-llama", "weights")
    for other in (
        make_engine("llama", tmp_path, shared_prefix=False),
        make_engine("llama", tmp_path, shared_prefix="Another text."),
        make_engine("llama-yarn", tmp_path),
        make_engine(half, tmp_path),
    ):
        with other as engine:
            assert engine.verdict() is None


def test_another_tenant_is_measured_on_its_own() -> None:
    engine = make_engine("llama", settings=LENIENT)
    engine.doctor(documents(3), "acme", prompts=3)
    assert engine.verdict("acme") is not None
    assert engine.verdict() is None
    assert engine.ask(QUESTION, documents(), tenant="acme").ledger.method == "retrieved-document"
    answer = engine.ask(QUESTION, documents())
    assert (answer.ledger.method, answer.ledger.fallbacks[0].reason) == ("full", "no_verdict")
    engine.close()


@pytest.mark.parametrize(
    ("verdicts", "runs", "reason"),
    [
        ((("retrieved-document", True), ("none", True)), "retrieved-document", None),
        ((("retrieved-document", True), ("none", False)), "retrieved-document", None),
        ((("retrieved-document", False), ("none", True)), "none", None),
        ((("retrieved-document", False), ("none", False)), "full", "gate_refused"),
        ((), "full", "gate_refused"),
    ],
)
def test_auto_runs_the_first_method_that_passed(
    verdicts: tuple[tuple[str, bool], ...], runs: str, reason: str | None
) -> None:
    engine = decided(make_engine("llama"), *verdicts)
    ledger = engine.ask(QUESTION, documents(), method="auto").ledger
    assert (ledger.asked, ledger.method) == ("auto", runs)
    assert [f.reason for f in ledger.fallbacks] == ([reason] if reason else [])
    if reason is not None:
        assert "name a method" in ledger.fallbacks[0].detail, "the way out is named"
    engine.close()


def test_policy_decides_whether_a_named_method_obeys_the_gate() -> None:
    engine = decided(make_engine("llama"), ("retrieved-document", True), ("none", False))
    docs = documents()

    def ran(**options: Any) -> tuple[str, list[str]]:
        ledger = engine.ask(QUESTION, docs, **options).ledger
        return ledger.method, [f.reason for f in ledger.fallbacks]

    assert ran(method="none") == ("none", []), "a named method runs unless told otherwise"
    assert ran(method="none", policy="always") == ("none", [])
    assert ran(method="none", policy="auto") == ("full", ["gate_refused"])
    assert ran(method="retrieved-document", policy="auto") == ("retrieved-document", [])
    refused = engine.ask(QUESTION, docs, method="epic:k=3", policy="auto").ledger.fallbacks[0].detail
    assert "epic:k=3: not measured" in refused
    assert "doctor --methods 'epic:k=3'" in refused, "what was named already is not told to name a method"
    assert ran(method="full", policy="auto") == ("full", [])
    with pytest.raises(InputError, match="policy: unknown policy 'allways'; did you mean 'always'"):
        engine.ask(QUESTION, docs, policy="allways")
    engine.close()


def test_an_unhealthy_model_refuses_every_reuse_under_policy_auto() -> None:
    engine = decided(make_engine("llama"), ("none", True), healthy=False)
    for method in ("auto", "none"):
        ledger = engine.ask(QUESTION, documents(), method=method, policy="auto").ledger
        assert (ledger.method, ledger.fallbacks[0].reason) == ("full", "unhealthy_model")
    engine.close()


def test_a_method_fails_by_its_own_figures_and_says_which() -> None:
    engine = make_engine("llama", settings=STRICT)
    report = engine.doctor(documents(4), prompts=3)
    assert report.healthy
    verdict = report.verdict("none")
    assert verdict is not None
    assert not verdict.passed
    assert "mean KL" in verdict.reason
    assert report.verdict("no such method") is None
    answer = engine.ask(QUESTION, documents())
    assert answer.ledger.method == "full"
    assert "mean KL" in answer.ledger.fallbacks[0].detail
    engine.close()


def test_compile_ends_with_a_gate_unless_told_not_to() -> None:
    engine = make_engine("llama", settings=LENIENT)
    assert engine.compile(documents(2), gate=False).gate is None
    assert engine.verdict() is None
    report = engine.compile(documents(3))
    assert report.gate is not None
    assert engine.verdict() == report.gate
    assert engine.ask(QUESTION, documents(3)).ledger.method == "retrieved-document"
    engine.close()


def test_the_gate_ends_in_time_but_measures_three_prompts() -> None:
    engine = make_engine("llama", settings=LENIENT)
    report = engine.doctor(documents(6), seconds=1e-6, prompts=6)
    assert [v.prompts for v in report.verdicts] == [3, 3]
    calls: list[tuple[int, int]] = []
    engine.doctor(documents(4), prompts=3, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    engine.close()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_documents_can_be_examined(count: int) -> None:
    engine = make_engine("llama", settings=LENIENT)
    report = engine.doctor(documents(count), prompts=3)
    assert report.healthy
    assert all(v.prompts == 3 for v in report.verdicts)
    engine.close()


def test_the_gate_works_without_documents_of_the_user_and_with_one_longer_than_it_samples() -> None:
    engine = make_engine("llama", settings=LENIENT)
    assert engine.doctor(prompts=3).healthy
    assert engine.doctor(documents(1, characters=2000), prompts=3).healthy
    engine.close()


def test_a_report_survives_json() -> None:
    engine = make_engine("llama")
    report = report_of(engine, ("none", True))
    assert DoctorReport.from_dict(report.as_dict()) == report
    engine.close()
    assert tiny("llama").pool.lent == 0


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_a_verdict_is_never_given_where_nothing_was_approximate(count: int) -> None:
    """A document alone stands behind an exact prefix: no limit can pass there without measuring anything."""
    engine = make_engine("llama", settings=STRICT)
    report = engine.doctor(documents(count), prompts=3)
    assert all(v.reused > 0 and not v.passed for v in report.verdicts)
    engine.close()


def test_fewer_prompts_than_needed_are_refused_and_leave_the_verdict() -> None:
    with make_engine("llama", settings=LENIENT) as engine:
        before = engine.doctor(documents(4), prompts=3)
        with pytest.raises(InputError, match="at least 3"):
            engine.doctor(documents(4), prompts=2)
        assert engine.verdict() == before
    assert "3 are needed" in dataclasses.replace(before.verdicts[0], prompts=2).shortfall(1e9, 0.0)


def test_the_limits_in_force_decide_not_those_of_the_measurement() -> None:
    store = Store.open(None, 1 << 28)
    Engine(tiny(), store, LENIENT).doctor(documents(4), prompts=3)
    assert Engine(tiny(), store, LENIENT).ask(QUESTION, documents(4)).ledger.method == "retrieved-document"
    strict = Engine(tiny(), store, STRICT).ask(QUESTION, documents(4)).ledger
    assert strict.method == "full"
    assert strict.fallbacks[0].reason == "gate_refused"


def test_any_methods_can_be_measured_with_what_they_were_charged() -> None:
    engine = make_engine("llama", settings=LENIENT)
    report = engine.doctor(documents(), prompts=3, methods=["retrieved-document:10%", "none", "retrieved-document"])
    assert [v.method for v in report.verdicts] == ["retrieved-document:10%", "none", "retrieved-document"]
    charged = {v.method: v.charged for v in report.verdicts}
    assert charged["none"] == 0.0
    assert 0.05 < charged["retrieved-document:10%"] <= 0.10 < charged["retrieved-document"] < 1.0
    assert "charged" in report.verdicts[0].summary
    engine.close()


def test_earlier_verdicts_of_other_methods_stay(tmp_path: Path) -> None:
    with make_engine("llama", tmp_path, settings=LENIENT) as engine:
        first = engine.doctor(documents(), prompts=3)
        second = engine.doctor(documents(6), prompts=4, methods=["none", "retrieved-document:5%"])
        assert [v.method for v in second.verdicts] == ["none", "retrieved-document:5%", "retrieved-document"]
        assert second.verdict("retrieved-document") == first.verdict("retrieved-document")
        assert [v.prompts for v in second.verdicts] == [4, 4, 3], "what was measured again is the newer one"
        assert engine.verdict("acme") is None
    with make_engine("llama", tmp_path, settings=STRICT) as engine:
        assert engine.verdict() == second
        third = engine.doctor(documents(), prompts=3, methods=["none"])
        kept = third.verdict("retrieved-document:5%")
        assert kept is not None
        assert (kept.mean_kl, kept.passed) == (second.verdicts[1].mean_kl, False), "held against the limits in force"
        assert "mean KL" in kept.reason


def test_what_was_not_measured_is_not_kept() -> None:
    engine = make_engine("llama", settings=LENIENT)
    unmeasured = report_of(engine, ("epic", True), ("none", True))
    rows = tuple(dataclasses.replace(v, prompts=0, passed=False) for v in unmeasured.verdicts)
    engine.store.write_note(
        namespace(None), note_name(engine), dataclasses.replace(unmeasured, verdicts=rows, checks=()).as_dict()
    )
    report = engine.doctor(documents(), prompts=3, methods=["none"])
    assert [(v.method, v.prompts) for v in report.verdicts] == [("none", 3)]
    assert report.checks, "of the newest run"
    engine.close()


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (["auto"], "name the methods to measure"),
        (["none", "full"], "what the others are measured against"),
        (["nonne"], "did you mean 'none'"),
        (["none:120%"], "between 0% and 100%"),
        ([], "at least one"),
        ("none", "must be a list"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(methods: Any, said: str) -> None:
    engine = make_engine("llama")
    with pytest.raises(InputError, match=said):
        engine.doctor(documents(), methods=methods)
    assert engine.verdict() is None
    assert engine.store.ls() == []
    engine.close()


def test_a_method_with_options_obeys_its_own_verdict() -> None:
    engine = decided(make_engine("llama"), ("none:5%", True), ("retrieved-document:5%", False), ("none", False))

    def ran(method: str, **options: Any) -> tuple[str, list[str]]:
        ledger = engine.ask(QUESTION, documents(), method=method, policy="auto", **options).ledger
        return ledger.method, [f.reason for f in ledger.fallbacks]

    assert ran("none:5%") == ran("none", budget="5%") == ran("none", budget=0.05) == ("none:5%", [])
    assert ran("retrieved-document", budget="5%") == ("full", ["gate_refused"])
    assert ran("retrieved-document", budget="7%") == ("full", ["gate_refused"]), "another budget was not measured"
    engine.close()


def test_compile_measures_what_auto_needs_although_other_methods_were_measured() -> None:
    engine = make_engine("llama", settings=LENIENT)
    engine.compile(documents(3), gate=False)
    engine.doctor(documents(3), prompts=3, methods=["none:5%"])
    report = engine.compile(documents(3))
    assert report.compiled == 0
    assert report.gate is not None
    assert [v.method for v in report.gate.verdicts] == ["retrieved-document", "none", "none:5%"]
    again = engine.compile(documents(3))
    assert again.gate == report.gate, "measured once"
    engine.close()


def test_a_note_of_the_format_before_is_not_read() -> None:
    engine = make_engine("llama")
    name = note_name(engine).replace("gate3", "gate2")
    assert name != note_name(engine)
    engine.store.write_note(namespace(None), name, report_of(engine, ("none", True)).as_dict())
    assert engine.verdict() is None
    engine.close()


def test_a_verdict_of_another_version_counts_as_none() -> None:
    engine = make_engine("llama", settings=LENIENT)
    engine.store.write_note(namespace(None), note_name(engine), {"verdicts": [], "of": "tomorrow"})
    assert engine.ask(QUESTION, documents(2)).ledger.fallbacks[0].reason == "no_verdict"
    engine.close()


def test_long_documents_are_cut_not_left_out() -> None:
    engine = make_engine("llama", settings=STRICT)
    long = [Document(f"{n} " + "the quick brown fox jumps " * 60, id=str(n)) for n in range(4)]
    report = engine.doctor(long, prompts=3)
    assert all(v.reused > 0 for v in report.verdicts)
    engine.close()
