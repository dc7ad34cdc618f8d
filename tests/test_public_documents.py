"""Public documents: compiled once for all who read them, and nothing else is ever shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from kvquilt import Document, Engine
from kvquilt.errors import InputError
from kvquilt.gate import note_name
from kvquilt.gate_report import Verdict
from kvquilt.identity import PUBLIC, namespace
from kvquilt.tokens import encoder
from tests.engines import QUESTION, at_rest, documents, make_engine
from tests.test_gate import LENIENT, report_of

HANDBOOK, OTHER, OWN = documents(3)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with make_engine(conversations=0) as made:
        yield made
        at_rest(made)


def public(document: Document) -> Document:
    return dataclasses.replace(document, tenant=PUBLIC)


def ask(engine: Engine, tenant: str, *docs: Document, method: str | None = "none") -> tuple[list[str], int]:
    """Where each document's keys and values came from, and the rows that were compiled."""
    ledger = engine.ask(QUESTION, docs, tenant=tenant, method=method, max_new_tokens=1).ledger
    return [use.source for use in ledger.documents], ledger.forward_tokens["compile"]


def spaces(engine: Engine, document: Document) -> set[str]:
    """Namespaces that have a segment as long as the document's."""
    tokens = len(encoder(engine.model.tokenizer).segment(document.text, document.end))
    return {row.key.namespace for row in engine.store.ls() if row.tokens == tokens}


def test_a_public_document_is_compiled_once_and_read_by_all(engine: Engine) -> None:
    engine.compile([HANDBOOK], PUBLIC, gate=False)
    for tenant in ("ann", "bob"):
        assert ask(engine, tenant, public(HANDBOOK), OWN)[0] == ["memory", "compiled"]
    assert spaces(engine, HANDBOOK) == {namespace(PUBLIC)}
    assert spaces(engine, OWN) == {namespace("ann"), namespace("bob")}


def test_one_that_nobody_compiled_is_compiled_for_all_by_the_first_who_reads_it(engine: Engine) -> None:
    assert ask(engine, "ann", public(HANDBOOK))[0] == ["compiled"]
    assert ask(engine, "bob", public(HANDBOOK))[0] == ["memory"]


def test_the_same_text_of_ones_own_shares_nothing_with_it(engine: Engine) -> None:
    engine.compile([HANDBOOK], PUBLIC, gate=False)
    sources, compiled = ask(engine, "ann", HANDBOOK)
    assert (sources, compiled > 0) == (["compiled"], True)
    assert spaces(engine, HANDBOOK) == {namespace(PUBLIC), namespace("ann")}


def test_answers_are_the_same_whoevers_a_document_is(engine: Engine) -> None:
    own = engine.ask(QUESTION, [HANDBOOK, OWN], tenant="ann", method="none")
    mixed = engine.ask(QUESTION, [public(HANDBOOK), OWN], tenant="ann", method="none")
    assert mixed.text == own.text


def test_another_tenants_document_is_refused_wherever_it_stands(engine: Engine) -> None:
    theirs = dataclasses.replace(OTHER, tenant="bob")
    with pytest.raises(InputError, match=r"documents\[1\].*another tenant"):
        ask(engine, "ann", OWN, theirs)
    with pytest.raises(InputError, match="another tenant"):
        engine.compile([theirs], "ann", gate=False)
    with pytest.raises(InputError, match="another tenant"):
        engine.compile([public(HANDBOOK)], "ann", gate=False)  # reading is shared, writing is not
    assert ask(engine, "bob", theirs)[0] == ["compiled"]


def test_what_is_encoded_behind_a_tenants_own_stays_that_tenants(engine: Engine) -> None:
    """A recipe that stores a document with what stood before it would tell others of that."""
    for _ in range(2):
        ask(engine, "ann", OWN, public(HANDBOOK), OTHER, method="cache-craft:1000000")
    assert not any(row.key.namespace == namespace(PUBLIC) for row in engine.store.ls())


def test_ids_remembered_of_one_tenants_texts_are_no_faster_for_another(engine: Engine) -> None:
    read = encoder(engine.model.tokenizer)
    for tenant, hits in (("ann", 0), ("ann", 1), ("bob", 0), (None, 0), (PUBLIC, 0), ("bob", 1)):
        before = read._segment.cache_info(), read._spans.cache_info()
        read.segment("a text that nobody else has", "\n", tenant)
        read.spans("a text that nobody else has\n", tenant)
        after = read._segment.cache_info(), read._spans.cache_info()
        assert [a.hits - b.hits for a, b in zip(after, before, strict=True)] == [hits, hits], tenant
    both = [dataclasses.replace(OWN, tenant=tenant) for tenant in ("ann", "bob")]
    before = read._segment.cache_info().misses
    ask(engine, "ann", both[0])
    ask(engine, "bob", both[1])
    assert read._segment.cache_info().misses == before + 2


def decided(engine: Engine, tenant: str, *verdicts: tuple[str, bool]) -> None:
    engine.store.write_note(namespace(tenant), note_name(engine), report_of(engine, *verdicts).as_dict())


@pytest.mark.parametrize(
    ("own", "shared", "docs", "runs"),
    [
        (True, None, [OWN], "none"),
        (True, None, [public(HANDBOOK)], "full"),  # nothing was measured on these
        (True, None, [OWN, public(HANDBOOK)], "full"),
        (None, True, [public(HANDBOOK), public(OTHER)], "none"),
        (None, True, [OWN, public(HANDBOOK)], "full"),
        (True, True, [OWN, public(HANDBOOK)], "none"),
        (True, False, [OWN, public(HANDBOOK)], "full"),
        (False, True, [OWN, public(HANDBOOK)], "full"),
        (False, True, [public(HANDBOOK)], "none"),
    ],
)
def test_auto_needs_a_verdict_on_the_documents_of_the_prompt(
    own: bool | None, shared: bool | None, docs: list[Document], runs: str
) -> None:
    with make_engine(conversations=0) as engine:
        for tenant, passed in (("ann", own), (PUBLIC, shared)):
            if passed is not None:
                decided(engine, tenant, ("none", passed))
        ledger = engine.ask(QUESTION, docs, tenant="ann", method="none", policy="auto", max_new_tokens=1).ledger
        assert ledger.method == runs
        assert [str(each.reason) for each in ledger.fallbacks if runs == "none"] == []


def test_where_both_were_measured_the_first_that_passes_on_both_runs() -> None:
    with make_engine(conversations=0, settings=LENIENT.model_copy(update={"gate_max_kl": 0.1})) as engine:
        order = engine.reader.auto_order
        decided(engine, "ann", *((name, True) for name in order))
        decided(engine, PUBLIC, (order[0], False), *((name, True) for name in order[1:]))
        assert engine.ask(QUESTION, [OWN], tenant="ann", method="auto").ledger.asked == "auto"
        ran = [
            engine.ask(QUESTION, [OWN, each], tenant="ann", method="auto", max_new_tokens=1).ledger.method
            for each in (OTHER, public(HANDBOOK))
        ]
        assert ran == [order[0], order[1] if len(order) > 1 else "full"]


def test_the_worse_figures_of_two_measurements_hold() -> None:
    good, bad = (
        Verdict("m", True, 0.1, 0.2, 0.9, 12, 90, 50, "", 0.05),
        Verdict("m", True, 0.3, 0.1, 0.8, 3, 9, 0, "", 0),
    )
    for found in (good.worse(bad), bad.worse(good)):
        assert (found.mean_kl, found.p95_kl, found.top1, found.prompts) == (0.3, 0.2, 0.8, 3)
        assert (found.tokens, found.reused, found.charged) == (9, 0, 0.05)
        assert found.shortfall(1, 0) == "no token was reused in the sample prompts"
