"""The account: it adds up, survives JSON, shows every document and every fallback, and never any text."""

from __future__ import annotations

import json
import logging
from dataclasses import FrozenInstanceError

import pytest

from kvquilt import Document
from kvquilt.accounting import counted_flops, full_flops
from kvquilt.ledger import DocumentUse, Fallback, FallbackReason, Ledger, Provenance
from kvquilt.model.counter import RowCounter
from kvquilt.repair.presets import find_method
from tests.engines import AFFORDABLE, PLAIN, QUESTION, documents, make_engine
from tests.models import tiny

SECRET = "xylophone"


def sample() -> Ledger:
    ledger = Ledger(method="full", asked="auto", model="tiny", threads=1)
    ledger.tokens[Provenance.EXACT] = 30
    ledger.tokens[Provenance.INLINE] = 10
    ledger.documents.append(DocumentUse("a[b]/c", 30, 0, Provenance.EXACT, "disk", "stands where it was"))
    ledger.bytes_read["disk"] = 3_000_000
    ledger.flops, ledger.flops_full = 1.0, 4.0
    ledger.fall_back("gate_refused", "none: mean KL [bold] 0.5 is above 0.1")
    return ledger


def test_it_survives_json() -> None:
    ledger = sample()
    data = json.loads(json.dumps(ledger.as_dict()))
    assert set(data["tokens"]) == {"exact", "reused", "recomputed", "corrected", "absent", "inline"}
    assert Ledger.from_dict(data) == ledger


def test_the_table_names_documents_fallbacks_and_the_method_asked_for() -> None:
    text = sample().table()
    for part in ("tiny: full (asked: auto)", "a[b]/c", "exact 30", "inline 10", "75% reused", "25.0% of a full",
                 "disk 3.0 MB", "gate_refused: none: mean KL [bold] 0.5"):  # fmt: skip
        assert part in text, part
    assert "asked" not in Ledger(method="none", asked="none").table()


def test_a_long_line_of_the_table_continues_under_itself_and_tears_no_figure() -> None:
    ledger = sample()
    ledger.seconds = {f"stage{n}": n + 0.125 for n in range(12)}
    lines = ledger.table(60).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("seconds"))
    assert lines[first + 1].startswith(" " * 17 + "stage") or lines[first + 1].lstrip()[0].isdigit()
    assert all(len(line) <= 60 for line in lines)
    assert f"{11.125:.3f}" in ledger.table(60)


def test_a_follow_up_has_no_documents_and_no_empty_table() -> None:
    text = Ledger(method="none", asked="none", model="tiny").table()
    assert text.startswith("tiny: none\nprompt tokens")


def test_an_empty_ledger_has_a_table_and_no_share() -> None:
    assert Ledger().reused_share == 0.0
    assert Ledger().table()


def test_stages_add_up_also_when_they_fail() -> None:
    ledger = Ledger()
    with ledger.stage("read"):
        pass
    first = ledger.seconds["read"]
    with pytest.raises(KeyError), ledger.stage("read"):
        raise KeyError
    assert ledger.seconds["read"] >= first >= 0


@pytest.mark.parametrize("method", AFFORDABLE.values(), ids=AFFORDABLE)
def test_an_answers_ledger_adds_up(method: str) -> None:
    with make_engine(trained=True) as engine:
        docs = [*documents(3), Document(f"The {SECRET} is green.", id="secret")]
        for _ in range(2):
            answer = engine.ask(QUESTION, docs, method=method)
        ledger = answer.ledger
        assert sum(ledger.tokens.values()) == answer.prompt_tokens
        assert {d.id for d in ledger.documents} == {d.id for d in docs}
        assert [(r.document, r.tokens, r.recomputed) for r in ledger.runs if r.document is not None] == [
            (d.id, d.tokens, d.recomputed) for d in ledger.documents
        ]
        by_run = dict.fromkeys(Provenance, 0)
        for run in ledger.runs:
            by_run[run.kept] += run.tokens - run.recomputed
            by_run[Provenance.RECOMPUTED] += run.recomputed
        assert by_run == ledger.tokens
        assert ledger.runs[-1].kept is Provenance.INLINE
        computed = ledger.tokens[Provenance.INLINE] + ledger.tokens[Provenance.RECOMPUTED]
        online = ledger.soft_rows if method.startswith("link-tokens") else 0  # its soft rows are never stored
        assert ledger.reused_share == pytest.approx(1 - computed / answer.prompt_tokens)
        if method.partition(":")[0] in PLAIN:
            assert ledger.forward_tokens["read"] == computed + online
            assert ledger.token_layers == 3 * sum(ledger.forward_tokens.values())
            assert 0 < ledger.flops <= ledger.flops_full
            assert (ledger.flops == ledger.flops_full) == (method == "full")
        whole = [d for d in ledger.documents if d.source == "-"]
        soft = ledger.soft_rows - online
        fetched = answer.prompt_tokens + soft - ledger.tokens[Provenance.INLINE] - sum(d.tokens for d in whole)
        noted = find_method(method).writer in ("in-situ", "digest")  # beside keys and values
        assert (sum(ledger.bytes_read.values()) > fetched * engine.model.bytes_per_token) == noted
        assert noted or sum(ledger.bytes_read.values()) == fetched * engine.model.bytes_per_token
        assert {"prompt", "lookup", "place", "read", "first_token", "total"} <= set(ledger.seconds)
        assert all(seconds >= 0 for seconds in ledger.seconds.values())
        assert ledger.seconds["total"] >= ledger.seconds["read"]
        for text in (answer.explain(), json.dumps(ledger.as_dict()), repr(answer)):
            assert SECRET not in text
        assert answer.explain() == ledger.table()


def test_estimated_work_counts_weights_and_causal_attention() -> None:
    model = tiny()
    c = model.capability
    weights, attention = 2.0 * model.layer_weights, 2.0 * c.layers * c.heads * (c.key_dim + c.value_dim)
    head = 2.0 * model.head_weights
    assert full_flops(model, 10) == head + 10 * weights + attention * 55
    counter = RowCounter(rows=3, token_layers=9, pairs=3 * (8 + 9 + 10))
    assert counted_flops(model, counter) == head + 3 * weights + attention * (8 + 9 + 10)


def test_brackets_in_an_id_are_not_markup() -> None:
    ledger = sample()
    ledger.documents.append(DocumentUse("notes[/b]", 1, 30, Provenance.INLINE, "-", "[red]"))
    assert "notes[/b]" in ledger.table()
    assert "[red]" in ledger.table()


def test_fallbacks_and_uses_are_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        Fallback("no_verdict", "b").reason = "c"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        sample().documents[0].why = "c"  # type: ignore[misc]


def test_a_fallback_has_one_of_the_known_reasons_and_equals_its_text() -> None:
    fallback = Fallback("gate_refused", "x")
    assert fallback.reason is FallbackReason.GATE_REFUSED
    assert fallback.reason == "gate_refused"
    assert json.loads(json.dumps(sample().as_dict()))["fallbacks"][0]["reason"] == "gate_refused"
    with pytest.raises(ValueError, match="no_reason"):
        Fallback("no_reason", "x")


def test_a_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvquilt"):
        Ledger().fall_back(FallbackReason.NOTHING_REUSED, "every document was computed")
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "nothing_reused: every document was computed")
