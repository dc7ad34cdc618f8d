"""Trained writers in service: repaired by any selector, accounted for, replaced, and never taken for another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvquilt.request
from kvquilt import Document
from kvquilt.errors import ContextLengthError, InputError, WriterError, WriterMismatchError
from kvquilt.gate import note_name
from kvquilt.gate_report import Verdict
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.language_model import LanguageModel, RowCounter
from kvquilt.model.parts import SOFT, Parts
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Order, Placement
from kvquilt.reading import Reader
from kvquilt.repair.operator import assemble, repair
from kvquilt.repair.presets import AUTO_ORDER, METHODS, find_method
from kvquilt.tuning import note_name as tuning_name
from kvquilt.writers.loaded import KINDS as WRITERS
from kvquilt.writers.loaded import load_all, split_name
from tests.engines import QUESTION, SETTINGS, at_rest, documents, make_engine, stored_bytes
from tests.models import tiny
from tests.oracle import close, full_prefill, runs_of, stock
from tests.repair.methods import least, ordered, read, reader_of, wrapped
from tests.writers.trained import random_writer, random_writers

pytestmark = pytest.mark.usefixtures("nan_slots")

KINDS = ("kv-packet", "sempic", "joint")
# they need statistics or a digest that only their own recipes note
OWN = ("cache-craft", "qcfuse", *WRITERS)
# options with which a ranking holds every row
WHOLE = {"retrieved-document": "documents=3", "epic": "k=40", "droidspeak": "last=3"}
SELECTING = [n for n, m in METHODS.items() if m.reuses and n not in OWN]
COMPUTING = [n for n in SELECTING if n not in ("none", "ape")]
selecting = pytest.mark.parametrize("name", SELECTING)
kinds = pytest.mark.parametrize("kind", KINDS)
shapes = st.lists(st.tuples(st.sampled_from("iABC"), st.integers(1, 9)), min_size=1, max_size=6)


@contextmanager
def passes() -> Iterator[list[tuple[tuple[int, ...], RowPlan]]]:
    """Ids of the slots and the plan of every repair pass inside the block."""
    seen: list[tuple[tuple[int, ...], RowPlan]] = []

    def watched(
        model: LanguageModel, cache: SlotCache, ids: Sequence[int], plan: RowPlan, logits: int, counter: RowCounter
    ) -> torch.Tensor:
        seen.append((tuple(ids), plan))
        return repair(model, cache, ids, plan, logits, counter)

    before, kvquilt.request.repair = kvquilt.request.repair, watched
    try:
        yield seen
    finally:
        kvquilt.request.repair = before


def written(name: str, kind: str, budget: str = "1000000") -> str:
    options = [f"writer={kind}"]
    if METHODS[name].budget is not None:
        options.append(budget)
    if name in WHOLE:
        options.append(WHOLE[name])
    return f"{name}:{','.join(options)}"


def soft_slots(placement: Placement) -> set[int]:
    return {slot for slot, i in enumerate(placement.ids) if i >= SOFT}


# composition with repair


@selecting
@settings(max_examples=6, deadline=None)
@given(shapes, st.sampled_from(KINDS), st.sampled_from([0.1, 0.4, 1.0]))
def test_soft_rows_are_neither_chosen_nor_charged_nor_counted(
    name: str, shape: list[tuple[str, int]], kind: str, share: float
) -> None:
    runs = runs_of("".join(k for k, _ in shape) + "Di", [*(length for _, length in shape), 5, 2])
    reader, method = reader_of(), find_method(written(name, kind))
    placement = ordered(runs, method)
    sizes = {i: len(placement.runs[i].ids) for i in placement.documents()}
    if method.budget is not None:
        allowed = max(least(reader, placement, method), int(share * sum(sizes.values()) * 3))
        method = method.within(allowed)
    with passes() as seen:
        out, ledger = read(reader, placement, method)
    (ids, plan), spent = seen[-1], ledger.spending
    assert spent is not None
    assert all(ids[row] < SOFT for row in plan.rows.tolist())
    assert sum(i >= SOFT for i in ids) == ledger.soft_rows, "they stay where other rows are dropped"
    header, trailer = reader.trained[kind].around
    assert ledger.soft_rows == len(sizes) * (len(header) + len(trailer))
    assert sum(ledger.tokens.values()) == placement.tokens
    assert ledger.tokens[Provenance.EXACT] == 0
    assert ledger.tokens[Provenance.RECOMPUTED] == spent.rows
    assert spent.tokens == sum(sizes.values()), "shares are of document tokens"
    assert method.budget is None or spent.charged <= method.budget.allows(spent.tokens, 3)
    assert ledger.writer == f"{kind} {reader.trained[kind].digest[:12]}"
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", COMPUTING)
def test_all_rows_over_an_adapters_segments_are_full_prefill(name: str, family: str) -> None:
    reader, method = reader_of(family), find_method(written(name, "sempic"))
    placement = ordered(runs_of("iABCi", (5, 14, 9, 16, 3)), method)
    out, ledger = read(reader, placement, method)
    runs = {run.document.id: i for i, run in enumerate(placement.runs) if run.document is not None}
    stood = placement.reordered([runs[d.id] for d in ledger.documents])
    assert close(out, full_prefill(stock(family), stood.ids)[-1:])
    none, _ = read(reader, placement, find_method("sempic"))
    assert not close(none, out, 1e-2), "the writer changes what is stored"


@torch.inference_mode()
def over_embeddings(family: str, placement: Placement, soft: torch.Tensor) -> torch.Tensor:
    """Logits of a stock forward over the wrapped prompt, soft rows put in place of embeddings."""
    hf, ids = stock(family), torch.tensor([placement.ids])
    rows = hf.get_input_embeddings()(ids.masked_fill(ids >= SOFT, 0))
    rows[ids >= SOFT] = soft[ids[ids >= SOFT] - SOFT]
    return hf(inputs_embeds=rows, use_cache=False).logits[0].float()


def assembled(reader: Reader, placement: Placement, kind: str) -> SlotCache:
    writer, held = reader.trained[kind], placement.documents()
    made = dict(writer.compile(reader.model, [placement.runs[i].ids for i in held]))
    cache = assemble(reader.model, placement, {i: made[n] for n, i in enumerate(held)}, placement.tokens)
    cache.parts = Parts(soft=writer.parts.soft)
    return cache


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "mistral-window"])
@pytest.mark.parametrize("kind", ["kv-packet", "joint"])
def test_all_rows_of_a_packet_its_soft_ones_too_are_a_forward_over_the_wrapped_embeddings(
    kind: str, family: str
) -> None:
    reader = reader_of(family)
    placement = wrapped(reader, ordered(runs_of("iABi", (4, 17, 9, 6)), METHODS[kind]), METHODS[kind])
    cache = assembled(reader, placement, kind)
    try:
        out = repair(reader.model, cache, placement.ids, RowPlan(torch.arange(placement.tokens), placement.tokens), 6)
    finally:
        reader.model.pool.release(cache)
    soft = reader.trained[kind].parts.soft
    assert soft is not None
    assert close(out, over_embeddings(family, placement, soft)[-6:])


@kinds
def test_all_document_rows_of_a_packet_stand_where_its_soft_rows_put_them(kind: str) -> None:
    """What is computed has the prompt's own ids, at positions that count the soft rows."""
    reader, method = reader_of(), find_method(f"retrieved-document:documents=2,order=given,writer={kind}")
    placement = ordered(runs_of("iABi", (4, 17, 9, 6)), method)
    read(reader, placement, method)
    placed, seen = wrapped(reader, placement, method), list[tuple[list[int], list[int]]]()

    def record(module: torch.nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        seen.append((kwargs["position_ids"][0].tolist(), kwargs["input_ids"][0].tolist()))

    handle = reader.model.hf.base_model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        _, ledger = read(reader, placement, method)
    finally:
        handle.remove()
    positions = [p for part, _ in seen for p in part]
    assert positions == [slot for slot in range(placed.tokens) if slot not in soft_slots(placed)]
    assert [i for _, part in seen for i in part] == list(placement.ids)
    assert [d.start for d in ledger.documents] == [placed.span(i).start for i in placed.documents()]
    assert ledger.tokens[Provenance.RECOMPUTED] == 26


@kinds
@pytest.mark.parametrize("order", [Order.SHARED_POSITIONS, Order.DENSITY_ASCENDING, Order.TARGET_LAST])
def test_the_next_token_stands_behind_the_soft_rows_in_every_order(kind: str, order: Order) -> None:
    reader, method = reader_of(), find_method(f"{kind}:order={order}")
    placement = ordered(runs_of("iABCi", (3, 20, 17, 12, 4)), method)
    ledger = Ledger()
    _, cache = reader.read(placement, method, None, ledger, 0)
    try:
        assert cache.next_position == wrapped(reader, placement, method).end
    finally:
        reader.model.pool.release(cache)
    around = sum(map(len, reader.trained[kind].around))
    expected = 3 + 20 + around + 4 if order is Order.SHARED_POSITIONS else placement.tokens + 3 * around
    assert wrapped(reader, placement, method).end == expected


@pytest.mark.parametrize("name", ["cache-craft", "qcfuse"])
def test_a_method_that_needs_notes_refuses_a_writer_that_makes_none(name: str) -> None:
    reader, method = reader_of(), find_method(f"{name}:writer=sempic")
    with pytest.raises(InputError, match=r"attention statistics|digest"):
        read(reader, ordered(runs_of("iABi", (3, 20, 17, 4)), method), method.within(10**6))
    assert reader.model.pool.lent == 0


@kinds
def test_a_prompt_that_ends_with_a_document_ends_with_its_last_soft_row(kind: str) -> None:
    reader, method = reader_of(), METHODS[kind]
    placement = wrapped(reader, ordered(runs_of("iA", (4, 17)), method), method)
    with passes() as seen:
        out, ledger = read(reader, ordered(runs_of("iA", (4, 17)), method), method)
    cache = assembled(reader, placement, kind)
    try:
        rows = torch.tensor([0, 1, 2, 3, placement.tokens - 1])
        truth = repair(reader.model, cache, placement.ids, RowPlan(rows, placement.tokens), 1)
    finally:
        reader.model.pool.release(cache)
    assert close(out, truth)
    assert seen[0][1].rows.tolist() == rows.tolist()
    assert ledger.tokens[Provenance.RECOMPUTED] == (kind == "sempic")


@kinds
@pytest.mark.parametrize("name", ["none", "samkv", "cacheblend", "ape"])
def test_a_conversation_goes_on_behind_soft_rows(kind: str, name: str) -> None:
    with make_engine(trained=True) as engine:
        first = engine.ask(QUESTION, documents(3), method=written(name, kind, "70%"), max_new_tokens=3)
        second = first.follow_up("And then?", max_new_tokens=3)
        third = second.follow_up("Why?", max_new_tokens=3)
        assert first.ledger.soft_rows == second.ledger.soft_rows == third.ledger.soft_rows
        assert second.ledger.writer == first.ledger.writer != ""
        for answer, before in ((second, first), (third, second)):
            assert answer.prompt_tokens == sum(answer.ledger.tokens.values())
            new = answer.ledger.tokens[Provenance.INLINE]
            assert answer.prompt_tokens == before.prompt_tokens + len(before.token_ids) + new - _pending(before)
            assert answer.ledger.tokens[Provenance.ABSENT] == first.ledger.tokens[Provenance.ABSENT]
        at_rest(engine, conversations=1)


def _pending(answer: object) -> int:
    """Tokens of the answer that the follow-up computed, since they were not in the cache yet."""
    return 1 if len(answer.token_ids) == 3 else 0  # type: ignore[attr-defined]


def test_soft_rows_count_towards_the_context() -> None:
    with make_engine("llama", trained=True) as engine:
        limit, docs = engine.model.capability.max_length, documents(4, 120)
        tokens = len(engine.prompt(QUESTION, docs).ids(engine.model.tokenizer))
        room = limit - tokens
        engine.ask(QUESTION, docs, method="sempic", max_new_tokens=room).ledger  # noqa: B018  # it fits
        for kind in ("kv-packet", "joint"):
            around = 4 * sum(map(len, engine.reader.trained[kind].around))
            with pytest.raises(ContextLengthError, match=f"with {around} soft tokens .* by {around}$"):
                engine.ask(QUESTION, docs, method=kind, max_new_tokens=room)
            engine.stream(QUESTION, docs, method=kind, max_new_tokens=room - around).cancel()


def test_a_document_that_fits_alone_and_not_with_its_soft_rows_is_refused() -> None:
    with make_engine(trained=True) as engine:
        text, limit = " word" * 3000, engine.model.capability.max_length
        encode = engine.model.tokenizer.encode
        while len(encode(text + "\n", add_special_tokens=False)) > limit:
            text = text[:-5]
        document = Document(text.strip(), id="long")
        engine.compile([document], gate=False, method="sempic")
        before = stored_bytes(engine)
        with pytest.raises(ContextLengthError, match="'long' is"):
            engine.compile([document], gate=False, method="kv-packet")
        assert stored_bytes(engine) == before


# writers by name


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
    model, made = tiny(), random_writers(tiny())
    paths = {kind: tmp_path / kind for kind in KINDS}
    for kind, path in paths.items():
        made[kind].save(path)
    given = [str(paths["sempic"]), paths["joint"], f"law={paths['sempic']}"]
    loaded = load_all(given, model)
    assert list(loaded) == ["sempic", "joint", "law"]
    assert loaded["law"].digest == loaded["sempic"].digest == made["sempic"].digest
    assert list(load_all(paths["kv-packet"], model)) == ["kv-packet"]
    assert list(load_all({"mine": paths["joint"]}, model)) == ["mine"]
    with pytest.raises(InputError, match="two are called 'sempic'"):
        load_all([paths["sempic"], paths["sempic"]], model)
    with pytest.raises(WriterMismatchError):
        load_all(paths["sempic"], tiny("qwen2"))
    with pytest.raises(WriterMismatchError):
        load_all(made["sempic"], tiny("qwen2"))
    with pytest.raises(WriterError):
        load_all(tmp_path / "nothing", model)
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
