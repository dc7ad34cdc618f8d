"""Trained writers in service: by name, replaced, judged by the gate, accounted for, and never taken for another."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvquilt.errors import InputError, WriterError, WriterMismatchError
from kvquilt.gate import note_name
from kvquilt.gate_report import Verdict
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.language_model import LanguageModel
from kvquilt.repair.presets import AUTO_ORDER
from kvquilt.tuning import note_name as tuning_name
from kvquilt.writers.loaded import Usable, load_all, paired, split_name
from tests.engines import QUESTION, SETTINGS, documents, make_engine, stored_bytes
from tests.models import tiny
from tests.writers.trained import random_writer, random_writers

pytestmark = pytest.mark.usefixtures("nan_slots")

KINDS = ("kv-packet", "sempic", "joint")


def test_a_replaced_writer_makes_misses_and_no_wrong_hits(tmp_path: Path) -> None:
    docs, old = documents(3), random_writer(tiny(), "joint", seed=1)
    new = random_writer(tiny(), "joint", seed=2)
    with make_engine(directory=tmp_path, writers={"joint": old}) as engine:
        first = engine.ask(QUESTION, docs, method="joint").ledger
        assert engine.ask(QUESTION, docs, method="joint").ledger.forward_tokens["compile"] == 0
        stored = stored_bytes(engine)
        stream = engine.stream(QUESTION, docs, method="joint")
        truth = engine.ask(QUESTION, docs, method="joint")
        assert engine.use(new) == "joint"
        swapped = engine.ask(QUESTION, docs, method="joint")
        opening = len(engine.reader.preamble)  # compiled once, by no writer
        assert swapped.ledger.forward_tokens["compile"] == first.forward_tokens["compile"] - opening > 0
        assert swapped.ledger.writer == f"joint {new.digest[:12]}"
        after = stored_bytes(engine)
        assert {key: after[key] for key in stored} == stored
        assert len(after) == len(stored) + 3
        late = stream.result()
        assert late.ledger.writer == f"joint {old.digest[:12]}", "it began before"
        assert (late.token_ids, late.ledger.forward_tokens["compile"]) == (truth.token_ids, 0)
        engine.use(old)
        assert engine.ask(QUESTION, docs, method="joint").ledger.forward_tokens["compile"] == 0
    with make_engine(writers={"joint": new}) as fresh:
        assert fresh.ask(QUESTION, docs, method="joint").token_ids == swapped.token_ids


def test_two_writers_of_one_kind_live_side_by_side() -> None:
    here, there = random_writer(tiny(), "sempic", seed=1), random_writer(tiny(), "sempic", seed=2)
    with make_engine(writers={"sempic": here, "law": there}) as engine:
        docs = documents(3)
        one = engine.ask(QUESTION, docs, method="sempic").ledger
        two = engine.ask(QUESTION, docs, method="sempic:writer=law").ledger
        assert one.writer == f"sempic {here.digest[:12]}"
        assert two.writer == f"sempic {there.digest[:12]} (law)"
        assert two.forward_tokens["compile"] == one.forward_tokens["compile"] - len(engine.reader.preamble)
        assert engine.reader.auto_order == ("sempic", "sempic:writer=law", *AUTO_ORDER)
        assert engine.ask(QUESTION, docs, method="cacheblend:writer=law,1000000").ledger.writer == two.writer
        with pytest.raises(InputError, match="did you mean 'law'"):
            engine.ask(QUESTION, docs, method="sempic:writer=laws")
        with pytest.raises(InputError, match="no trained writer of that name is loaded; there is sempic, law"):
            engine.ask(QUESTION, docs, method="joint")


@pytest.mark.parametrize("name", ["isolated", "residual-3", "a,b", "x=y", "9", "a b", "joint"])
def test_a_name_that_is_taken_or_none_is_refused(name: str) -> None:
    with make_engine() as engine, pytest.raises(InputError, match="writer: "):
        engine.use(random_writer(tiny(), "sempic"), name)


def test_folders_are_loaded_with_and_without_names(tmp_path: Path) -> None:
    def load(given: Any, model: LanguageModel) -> dict[str, Usable]:
        return load_all(paired(given), model)

    model, made = tiny(), random_writers(tiny())
    paths = {kind: tmp_path / kind for kind in KINDS}
    for kind, path in paths.items():
        made[kind].save(path)
    given = [str(paths["sempic"]), paths["joint"], f"law={paths['sempic']}"]
    loaded = load(given, model)
    assert list(loaded) == ["sempic", "joint", "law"]
    assert loaded["law"].digest == loaded["sempic"].digest == made["sempic"].digest
    assert list(load(paths["kv-packet"], model)) == ["kv-packet"]
    assert list(load({"mine": paths["joint"]}, model)) == ["mine"]
    with pytest.raises(InputError, match="two are called 'sempic'"):
        load([paths["sempic"], paths["sempic"]], model)
    with pytest.raises(WriterMismatchError):
        load(paths["sempic"], tiny("qwen2"))
    with pytest.raises(WriterMismatchError):
        load(made["sempic"], tiny("qwen2"))
    with pytest.raises(WriterError):
        load(tmp_path / "nothing", model)
    odd = tmp_path / "a=b"
    made["sempic"].save(odd)
    assert split_name(str(odd)) == ("", str(odd)), "a folder that is called so"


def test_a_writer_behind_a_prefix_serves_behind_any_opening() -> None:
    with make_engine() as engine:
        prefix = engine.reader.preamble
        behind, alone = random_writer(tiny(), "joint", prefix), random_writer(tiny(), "joint")
        assert behind.digest != alone.digest
        docs = documents(3)
        engine.use(behind)
        engine.use(alone, "alone")
        one = engine.ask(QUESTION, docs, method="joint").ledger
        assert one.tokens[Provenance.EXACT] == len(prefix), "the opening; no document, even behind its own prefix"
        engine.ask(QUESTION, docs, method="joint:writer=alone")
        assert engine.store.stats()["memory"].segments == 7
        repaired = engine.ask(QUESTION, docs, method="retrieved-document:documents=3,writer=joint").ledger
        assert repaired.tokens[Provenance.RECOMPUTED] == one.tokens[Provenance.REUSED]


# the gate and the account

LENIENT = SETTINGS.model_copy(update={"gate_max_kl": 1e3, "gate_min_top1": 0.0})
STRICT = SETTINGS.model_copy(update={"gate_max_kl": 0.1, "gate_min_top1": 0.9})


def test_a_verdict_holds_for_the_very_writer(tmp_path: Path) -> None:
    docs, old = documents(4), random_writer(tiny(), "sempic", seed=1)
    new = random_writer(tiny(), "sempic", seed=2)
    with make_engine(directory=tmp_path, settings=LENIENT, writers={"sempic": old}) as engine:
        report = engine.compile(docs).gate
        assert report is not None
        assert [v.method for v in report.verdicts] == ["sempic", *AUTO_ORDER]
        assert [v.trained for v in report.verdicts] == [f"sempic {old.digest}", "", ""]
        ran = engine.ask(QUESTION, docs).ledger
        assert (ran.method, ran.fallbacks, ran.writer) == ("sempic", [], f"sempic {old.digest[:12]}")
        assert ran.gate.startswith("sempic passed")
        assert ran.forward_tokens["compile"] == 0, "compile had prepared for it"

        engine.use(new)
        unmeasured = engine.verdict()
        assert unmeasured is not None
        assert unmeasured.verdict("sempic") is None
        fell = engine.ask(QUESTION, docs).ledger
        assert fell.method == AUTO_ORDER[0]
        assert [f.reason for f in fell.fallbacks] == ["gate_refused"]
        assert fell.fallbacks[0].detail == f"sempic: not measured; {AUTO_ORDER[0]} runs instead"
        always = engine.ask(QUESTION, docs, method="sempic", policy="auto").ledger
        assert (always.method, always.fallbacks[0].reason) == ("full", "gate_refused")

        engine.doctor(docs, methods=["sempic"], prompts=3)
        assert engine.ask(QUESTION, docs).ledger.method == "sempic"
        engine.use(old)
        assert engine.ask(QUESTION, docs).ledger.method == "sempic", "its verdict was kept beside the other one's"
    with make_engine(directory=tmp_path, settings=LENIENT) as plain:
        assert plain.ask(QUESTION, docs).ledger.fallbacks == [], "without writers nothing of theirs is expected"
        assert plain.ask(QUESTION, docs).ledger.method == AUTO_ORDER[0]


def test_auto_says_that_a_writer_did_not_pass_and_what_runs_instead() -> None:
    writer = random_writer(tiny(), "sempic")
    with make_engine(settings=STRICT, writers={"sempic": writer}) as engine:
        docs = documents(3)
        report = engine.doctor(docs, prompts=3, methods=["sempic", "none"])
        bad, good = (report.verdict(name) for name in ("sempic", "none"))
        assert isinstance(bad, Verdict)
        assert isinstance(good, Verdict)
        made = (
            dataclasses.replace(bad, mean_kl=2.0, top1=0.1, reused=9, prompts=3),
            dataclasses.replace(good, mean_kl=0.01, top1=1.0, reused=9, prompts=3),
        )
        engine._measured.keep(None, dataclasses.replace(report, verdicts=made))
        ran = engine.ask(QUESTION, docs).ledger
        assert ran.method == "none"
        assert "mean KL 2.000 is above 0.1" in ran.fallbacks[0].detail
        assert ran.fallbacks[0].detail.endswith("; none runs instead")
        assert ran.gate.startswith("none passed")


def test_a_writer_that_is_replaced_while_it_is_measured_gets_no_verdict() -> None:
    with make_engine(settings=LENIENT, writers={"sempic": random_writer(tiny(), "sempic", seed=1)}) as engine:

        def replaced(done: int, total: int) -> None:
            engine.use(random_writer(tiny(), "sempic", seed=2))

        report = engine.doctor(documents(3), prompts=3, methods=["sempic"], progress=replaced)
        assert report.verdict("sempic") is None
        assert not engine.ask(QUESTION, documents(3)).ledger.method.startswith("sempic")


def test_a_tuning_holds_for_the_writers_that_it_knew() -> None:
    with make_engine() as engine:
        names = {tuning_name(engine)}
        for seed in (1, 2):
            engine.use(random_writer(tiny(), "sempic", seed=seed))
            names.add(tuning_name(engine))
        engine.use(random_writer(tiny(), "joint"))
        names.add(tuning_name(engine))
        assert len(names) == 4
        assert len({note_name(engine)}) == 1, "the gate keeps its verdicts together, each with its writer"


def test_the_account_names_the_writer_and_its_soft_rows() -> None:
    with make_engine(trained=True) as engine:
        answer = engine.ask(QUESTION, documents(3), method="kv-packet")
        table = answer.explain()
        assert f"writer           kv-packet {random_writers(tiny())['kv-packet'].digest[:12]}" in table
        assert "+15 soft rows" in table
        assert Ledger.from_dict(json.loads(json.dumps(answer.ledger.as_dict()))) == answer.ledger
        assert answer.ledger.flops_full == engine.ask(QUESTION, documents(3), method="full").ledger.flops_full
        plain = engine.ask(QUESTION, documents(3), method="none")
        assert (plain.ledger.writer, plain.ledger.soft_rows) == ("", 0)
        assert "soft rows" not in plain.explain()
