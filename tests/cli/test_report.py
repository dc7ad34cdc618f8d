"""What `doctor` and `compile` say that `auto` will run."""

from __future__ import annotations

import dataclasses

import pytest

from kvquilt.cli.doctor import show_report
from kvquilt.gate_report import Check, DoctorReport, Verdict
from kvquilt.tuning_report import Trial, TuneReport

GATE = DoctorReport(
    model="tiny",
    fingerprint="f",
    writer="w",
    checks=(Check("c", True, 0.0, 1.0),),
    verdicts=(Verdict("none", True, 0.1, 0.2, 0.9, 3, 30, 30, "", 0.0),),
    max_kl=0.3,
    min_top1=0.85,
    seconds=1.0,
)
HELD = Trial("epic:k=4", 0.99, 0.99, None, 0.01, 0.01, 0.9, 0.1, 2.0, 3)
TUNED = TuneReport("tiny", "f", "w", 0.98, "fidelity", (HELD,), "epic:k=4", HELD, 1.0)


def test_a_tuned_choice_goes_before_the_gate(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(GATE, TUNED)
    assert "`auto` uses epic:k=4, which `tune` chose for 0.98: fidelity 0.990" in capsys.readouterr().out


@pytest.mark.parametrize("tuned", [None, dataclasses.replace(TUNED, chosen=None, held_out=None)])
def test_without_one_the_gate_decides(tuned: TuneReport | None, capsys: pytest.CaptureFixture[str]) -> None:
    show_report(GATE, tuned)
    assert "`auto` uses none." in capsys.readouterr().out


def test_on_an_unhealthy_model_nothing_that_was_tuned_runs(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(dataclasses.replace(GATE, checks=(Check("c", False, 2.0, 1.0),)), TUNED)
    assert "so it uses full prefill" in capsys.readouterr().out
