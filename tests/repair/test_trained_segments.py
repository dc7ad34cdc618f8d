"""Trained segments under repair: soft rows are neither chosen, charged nor dropped, and stand where they belong."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvquilt.request
from kvquilt import Document
from kvquilt.errors import ContextLengthError, InputError
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import SOFT, Parts
from kvquilt.model.rows import RowPlan
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Order, Placement
from kvquilt.reading import Reader
from kvquilt.repair.operator import assemble, repair
from kvquilt.repair.presets import METHODS, find_method
from kvquilt.writers.recipes import KINDS as WRITERS
from tests.engines import QUESTION, at_rest, documents, make_engine, stored_bytes
from tests.oracle import close, full_prefill, runs_of, stock
from tests.repair.methods import least, ordered, read, reader_of, wrapped

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
        limit, encode = engine.model.capability.max_length, engine.model.tokenizer.encode
        words = bisect_right(
            range(limit), limit, key=lambda n: len(encode(" word" * n + "\n", add_special_tokens=False))
        )
        document = Document((" word" * (words - 1)).strip(), id="long")
        engine.compile([document], gate=False, method="sempic")
        before = stored_bytes(engine)
        with pytest.raises(ContextLengthError, match="'long' is"):
            engine.compile([document], gate=False, method="kv-packet")
        assert stored_bytes(engine) == before
