"""The whole way on tiny models: what is reused, stored and given back, and that answers are the right ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvquilt import Document, Engine, Prompt
from kvquilt.errors import ConversationError, InputError, IntegrityError, NumericsError
from kvquilt.identity import segment_key
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import current_plan
from kvquilt.placement import Order, place_runs
from kvquilt.prompt import Run, continuation, segment_ids
from kvquilt.repair.operator import repair
from kvquilt.repair.presets import METHODS, find_method
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.recipes import KINDS
from tests.engines import AFFORDABLE, PLAIN, QUESTION, SETTINGS, at_rest, documents, make_engine, stored_bytes
from tests.models import FAMILIES, build, tiny
from tests.oracle import full_prefill, random_ids, stock
from tests.repair.methods import SLOTTED
from tests.templates import GEMMA
from tests.tokenizers import byte_level

families = pytest.mark.parametrize("family", FAMILIES)
methods = pytest.mark.parametrize("method", AFFORDABLE.values(), ids=AFFORDABLE)
slotted = pytest.mark.parametrize("method", [AFFORDABLE[name] for name in SLOTTED], ids=SLOTTED)


@pytest.fixture
def engine(nan_slots: None) -> Iterator[Engine]:
    with make_engine(trained=True) as made:
        yield made
    assert made.model.pool.lent == 0


@pytest.fixture
def alone(nan_slots: None) -> Iterator[Engine]:
    """An engine whose documents are encoded behind nothing."""
    with make_engine(shared_prefix=False, trained=True) as made:
        yield made
    assert made.model.pool.lent == 0


@pytest.fixture
def on_disk(tmp_path: Path, nan_slots: None) -> Iterator[Engine]:
    with make_engine(directory=tmp_path) as made:
        yield made
    assert made.model.pool.lent == 0


def greedy(family: str, ids: tuple[int, ...], count: int) -> list[int]:
    """What a stock model's `generate` answers."""
    hf = stock(family)
    out = hf.generate(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=count, do_sample=False, eos_token_id=sorted(tiny(family).stop_ids), pad_token_id=0,
    )  # fmt: skip
    new: list[int] = out[0, len(ids) :].tolist()
    return new[:-1] if new and new[-1] in tiny(family).stop_ids else new


def prompt_ids(engine: Engine, docs: list[Document], question: str = QUESTION) -> tuple[int, ...]:
    return engine.prompt(question, docs).ids(engine.model.tokenizer)


def tokens_of(engine: Engine, *docs: Document) -> int:
    return sum(len(segment_ids(d, engine.model.tokenizer)) for d in docs)


class Failing:
    """Makes the n-th forward from now on raise, as an out-of-memory would."""

    def __init__(self, model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left: int | None = None
        self._kind: type[BaseException] = RuntimeError
        layer = model.hf.base_model.layers[1]
        forward = layer.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._left is not None:
                self._left -= 1
                if self._left <= 0:
                    self._left = None
                    raise self._kind("planted")
            return forward(*args, **kwargs)

        monkeypatch.setattr(layer, "forward", counted)

    def at(self, forward: int, kind: type[BaseException] = RuntimeError) -> None:
        self._left, self._kind = forward, kind


# what full prefill and decoding say


@families
def test_full_answers_as_stock_generate_does(family: str) -> None:
    engine = make_engine(family)
    for count in (1, 3):
        docs = documents(count)
        answer = engine.ask(QUESTION, docs, method="full", max_new_tokens=12)
        assert list(answer.token_ids) == greedy(family, prompt_ids(engine, docs), 12)
    engine.close()


def test_rows_all_never_flips_a_greedy_answer_of_a_fixed_set() -> None:
    """Case 23 in fp32: all rows through the masked path against plain prefill, thirty prompts."""
    model = tiny("qwen3")
    for seed in range(30):
        ids = random_ids(60, seed)
        cache = model.pool.acquire(60)
        repair(model, cache, ids, [range(60)], 0)
        out = repair(model, cache, ids, [range(1, 30), range(31, 60)], 20)
        model.pool.release(cache)
        assert torch.equal(out.argmax(-1), full_prefill(stock("qwen3"), ids)[-20:].argmax(-1))


@slotted
def test_decode_positions_continue_from_the_last_logical_one(engine: Engine, method: str) -> None:
    seen: list[list[int]] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["position_ids"][0].tolist())

    docs = documents(3)
    engine.ask(QUESTION, docs, method=method)
    handle = engine.model.hf.base_model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        answer = engine.ask(QUESTION, docs, method=method, max_new_tokens=5)
    finally:
        handle.remove()
    steps = len(answer.token_ids) - 1
    assert answer.ledger.forward_tokens["decode"] == steps
    last = seen[-1 - steps][-1]
    assert seen[len(seen) - steps :] == [[last + 1 + step] for step in range(steps)]
    if find_method(method).order is Order.SHARED_POSITIONS:
        assert last < answer.prompt_tokens - 1, "documents side by side reach less far"
    else:
        assert last == answer.prompt_tokens + answer.ledger.soft_rows - 1


def test_a_slot_cache_handed_to_generate_is_refused(engine: Engine) -> None:
    model = engine.model
    cache = model.pool.acquire(64)
    try:
        with pytest.raises(IntegrityError, match="cannot be passed to generate"):
            model.hf.generate(
                input_ids=torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 2, dtype=torch.int64),
                cache=cache, max_new_tokens=2, do_sample=False, pad_token_id=0,
            )  # fmt: skip
    finally:
        model.pool.release(cache)
    assert current_plan() is None


# what is reused and what is stored


@methods
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_same_prompt_three_times(family: str, method: str) -> None:
    """Case 1: from the second time on the same bits, nothing compiled, the same keys in the store."""
    engine, docs = make_engine(family, trained=True), documents()
    first, second, third = (engine.ask(QUESTION, docs, method=method) for _ in range(3))
    keys = set(stored_bytes(engine))
    assert first.token_ids == second.token_ids == third.token_ids
    inline = len(prompt_ids(engine, docs)) - tokens_of(engine, *docs) - len(engine.reader.preamble)
    ledger = third.ledger
    if method == "full":
        assert not keys
        assert ledger.forward_tokens["read"] == third.prompt_tokens
    else:
        spent = ledger.tokens[Provenance.RECOMPUTED]
        # asked as it was encoded, every document of cache-craft is exact
        assert (spent > 0) == (method not in ("none", "ape", "cache-craft", *KINDS))
        if method.partition(":")[0] in PLAIN:
            links = ledger.soft_rows if method == "link-tokens" else 0  # of all soft rows, only links are computed
            assert ledger.forward_tokens["read"] == inline + links + spent
            assert ledger.forward_tokens["probe"] == 0
        assert ledger.tokens[Provenance.INLINE] == inline
    assert second.ledger.forward_tokens == ledger.forward_tokens
    assert ledger.forward_tokens["compile"] == 0
    assert sum(ledger.tokens.values()) == third.prompt_tokens == len(prompt_ids(engine, docs))
    assert set(stored_bytes(engine)) == keys
    engine.close()


@pytest.mark.parametrize("missing", [(0,), (3,), (1, 2), (1, 3), (0, 1, 2, 3)], ids=str)
def test_a_partial_hit_stores_all_the_rest(on_disk: Engine, missing: tuple[int, ...]) -> None:
    """Case 2: misses first, last, adjacent; afterwards each is stored once and nothing is compiled again."""
    engine, docs = on_disk, documents()
    stored = [d for i, d in enumerate(docs) if i not in missing]
    if stored:
        engine.compile(stored, gate=False)
    first = engine.ask(QUESTION, docs, method="none").ledger
    assert [d.source == "compiled" for d in first.documents] == [i in missing for i in range(4)]
    for use, index in zip(first.documents, range(4), strict=True):
        assert ("was not stored (absent)" in use.why) == (index in missing)
    fingerprint, writer = engine.model.fingerprint.digest, engine.writer.digest
    wanted = {
        segment_key(fingerprint, writer, None, segment_ids(d, engine.model.tokenizer)).digest for d in docs
    }  # fmt: skip
    names = [Path(name).stem for name in stored_bytes(engine)]
    assert len(names) == len(set(names)) == 5, "four documents and the preamble"
    assert wanted < set(names)
    second = engine.ask(QUESTION, docs, method="none").ledger
    assert second.forward_tokens["compile"] == 0
    assert all(d.source == "memory" for d in second.documents)


def test_nothing_recomputed_means_nothing_recomputed() -> None:
    """Case 3: with the misses on top, exactly the inline rows and the misses pass the model."""
    engine, docs = make_engine(shared_prefix=False), documents()
    inline = len(prompt_ids(engine, docs)) - tokens_of(engine, *docs)
    opening = len(engine.reader.preamble)
    engine.compile(docs[:3], gate=False)
    ledger = engine.ask(QUESTION, docs, method="none", max_new_tokens=1).ledger
    assert ledger.forward_tokens == {
        "compile": tokens_of(engine, docs[3]) + opening,
        "probe": 0,
        "read": inline - opening,
        "decode": 0,
    }
    assert ledger.tokens[Provenance.RECOMPUTED] == 0
    assert ledger.token_layers == 3 * sum(ledger.forward_tokens.values())
    again = engine.ask(QUESTION, docs, method="none", max_new_tokens=1).ledger
    assert again.forward_tokens == {"compile": 0, "probe": 0, "read": inline - opening, "decode": 0}
    engine.close()


def test_the_opening_and_the_first_document_are_exact_behind_a_shared_prefix(engine: Engine) -> None:
    docs = documents(3)
    ledger = engine.ask(QUESTION, docs, method="none").ledger
    assert ledger.tokens[Provenance.EXACT] == len(engine.reader.preamble) + tokens_of(engine, docs[0])
    assert [d.provenance for d in ledger.documents] == [Provenance.EXACT, Provenance.REUSED, Provenance.REUSED]
    one = engine.ask(QUESTION, docs[:1], method="none")
    assert one.token_ids == engine.ask(QUESTION, docs[:1], method="full").token_ids


@pytest.mark.parametrize("tokens", [1, 255, 256, 257])
def test_documents_of_any_length_are_reused_whole(engine: Engine, tokens: int) -> None:
    """Case 15: no grid of chunks, so no length is special."""
    words = "a" * 2000
    tokenizer = engine.model.tokenizer
    text = next(
        words[:n] + "b" * extra
        for n in range(2000)
        for extra in range(3)
        if len(segment_ids(Document(words[:n] + "b" * extra or "b", end=""), tokenizer)) == tokens and n + extra
    )
    docs = [Document("First of all.", id="first"), Document(text, id="measured", end="")]
    engine.compile(docs, gate=False, method="none")
    ledger = engine.ask(QUESTION, docs, method="none").ledger
    assert (ledger.documents[1].tokens, ledger.documents[1].provenance) == (tokens, Provenance.REUSED)
    assert ledger.forward_tokens["compile"] == len(engine.reader.preamble)
    assert ledger.tokens[Provenance.REUSED] == tokens


def test_a_budget_is_held_against_the_documents_as_this_tenant_has_them_before_anything_is_computed() -> None:
    docs, method = documents(4), "cacheblend:1%,writer=in-situ"
    with make_engine() as engine:
        engine.compile(docs, tenant="acme", gate=False, method=method)
        with pytest.raises(InputError, match="least possible"):
            engine.stream(QUESTION, docs[::-1], method=method, tenant="acme")
        # another tenant's are encoded where they stand, so that nothing is left to spend on
        assert engine.ask(QUESTION, docs[::-1], method=method, tenant="other", max_new_tokens=1).ledger.spending


def test_tenants_do_not_share_and_a_tenant_finds_its_own_after_a_restart(tmp_path: Path) -> None:
    docs = documents()
    with make_engine(directory=tmp_path) as engine:
        engine.compile(docs, tenant="acme", gate=False)
        assert engine.ask(QUESTION, docs, method="none").ledger.forward_tokens["compile"] > 0
        assert engine.ask(QUESTION, docs, method="none", tenant="acme").ledger.documents[0].source == "memory"
    with make_engine(directory=tmp_path) as engine:
        ledger = engine.ask(QUESTION, docs, method="none", tenant="acme").ledger
        assert {d.source for d in ledger.documents} == {"disk"}
        assert ledger.bytes_read["disk"] >= tokens_of(engine, *docs) * engine.model.bytes_per_token


def test_no_special_token_is_doubled_wherever_the_documents_stand() -> None:
    """Case 15: exactly one beginning-of-text token."""
    tokenizer = byte_level(bos="<|begin_of_text|>")
    model = LanguageModel.wrap(build("llama", vocab_size=len(tokenizer)), tokenizer, "bos", "bos")
    engine, docs = make_engine(model, trained=True), documents(2)
    for prompt in (
        engine.prompt(QUESTION, docs),
        Prompt([*docs, "\nWhat?"]),
        Prompt([docs[0], "\nand\n", docs[1]]),
        Prompt(["Read: ", docs[0], "\nWhat?"]),
    ):
        ids = prompt.ids(tokenizer)
        assert [i for i, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0]
        for method in AFFORDABLE.values():
            answer = engine.ask(prompt, method=method)
            assert answer.prompt_tokens == len(ids)
    engine.close()


# retrieved-document


def test_the_target_moves_last_and_equals_full_prefill_of_that_order(engine: Engine) -> None:
    """With one other document, exact behind the shared opening, every row is as in a full prefill."""
    first, target = documents(2)
    scored = [Document(target.text, id=target.id, score=2.0), Document(first.text, id=first.id, score=1.0)]
    answer = engine.ask(QUESTION, scored, method="retrieved-document")
    assert [d.id for d in answer.ledger.documents] == [first.id, target.id]
    assert [d.provenance for d in answer.ledger.documents] == [Provenance.EXACT, Provenance.RECOMPUTED]
    full = engine.ask(QUESTION, [first, target], method="full")
    assert answer.token_ids == full.token_ids
    inline = full.prompt_tokens - tokens_of(engine, first, target) - len(engine.reader.preamble)
    assert answer.ledger.forward_tokens["read"] == inline + tokens_of(engine, target)


def test_given_scores_beat_bm25_and_bm25_decides_without_them(engine: Engine) -> None:
    docs = [
        Document("The lighthouse keeper counts ships.", id="ships"),
        Document("Quilts are sewn from patches of cloth.", id="quilts"),
        Document("A volcano erupted near the village.", id="volcano"),
    ]
    ask = "Which patches of cloth make quilts?"
    by_words = engine.ask(ask, docs, method="retrieved-document").ledger
    assert [d.id for d in by_words.documents] == ["ships", "volcano", "quilts"]
    scored = [Document(d.text, id=d.id, score=s) for d, s in zip(docs, (0.1, 0.2, 0.9), strict=True)]
    by_score = engine.ask(ask, scored, method="retrieved-document").ledger
    assert [d.id for d in by_score.documents] == ["ships", "quilts", "volcano"]
    assert by_score.documents[-1].provenance == Provenance.RECOMPUTED
    some = [docs[0], Document(docs[1].text, id="quilts", score=-3.0), docs[2]]
    assert engine.ask(ask, some, method="retrieved-document").ledger.documents[-1].id == "quilts"
    assert by_score.bytes_read, "the others were read, not computed"


def test_a_single_document_is_exact_or_computed_in_place() -> None:
    doc = documents(1)
    for prefix in (True, False):
        engine = make_engine(shared_prefix=prefix)
        full = engine.ask(QUESTION, doc, method="full")
        answer = engine.ask(QUESTION, doc, method="retrieved-document")
        assert answer.token_ids == full.token_ids
        expected = Provenance.EXACT if prefix else Provenance.RECOMPUTED
        assert answer.ledger.documents[0].provenance == expected
        engine.close()


@slotted
@pytest.mark.parametrize(
    "shape",
    ["iA", "A", "AB", "Ai", "ABi", "iAiBi", "iAAi", "AiA", "iABCi", "iABAi", "iiABii", "AiBiC", "i"],
)
def test_any_shape_of_prompt_is_answered(alone: Engine, method: str, shape: str) -> None:
    docs = dict(zip("ABC", documents(3, 60), strict=True))
    prompt = Prompt([docs.get(kind, f" inline {n} ") for n, kind in enumerate(shape)])
    answer = alone.ask(prompt, method=method, max_new_tokens=3)
    ids = prompt.ids(alone.model.tokenizer)
    assert answer.prompt_tokens == len(ids)
    ledger = answer.ledger
    assert sum(ledger.tokens.values()) == len(ids)
    assert [d.start for d in ledger.documents] == sorted(d.start for d in ledger.documents)
    exact = find_method(method).correction is None or not find_method(method).correction.alters_exact
    assert len(ledger.documents) == sum(kind in docs for kind in shape)
    exact = exact and method not in KINDS
    if method == "full" or shape == "i" or (exact and shape in ("Ai", "A")):
        assert list(answer.token_ids) == greedy("llama", ids, 3)
    if shape == "i":
        assert not ledger.fallbacks, "without documents no reuse was expected"


def test_the_same_document_twice_is_fetched_once_and_placed_twice(alone: Engine) -> None:
    [doc] = documents(1)
    prompt = Prompt([doc, " and again ", doc, " What? "])
    ledger = alone.ask(prompt, method="none").ledger
    size = tokens_of(alone, doc)
    assert (ledger.tokens[Provenance.EXACT], ledger.tokens[Provenance.REUSED]) == (size, size)
    assert len(stored_bytes(alone)) == 1
    repaired = alone.ask(prompt, method="retrieved-document").ledger
    assert (repaired.tokens[Provenance.EXACT], repaired.tokens[Provenance.RECOMPUTED]) == (size, size)


def test_an_empty_document_inside_a_prompt_has_no_tokens_and_harms_nothing(engine: Engine) -> None:
    empty, full = Document("", id="empty", end="", score=9.0), Document("some text", id="full")
    for method in AFFORDABLE.values():
        ledger = engine.ask(Prompt(["Read: ", empty, full, " What?"]), method=method).ledger
        assert [d.id for d in ledger.documents] == ["full"]


# streams, and what must be left behind


def test_pieces_join_to_the_answer_and_input_errors_come_before_the_first(engine: Engine) -> None:
    docs = documents()
    stream = engine.stream(QUESTION, docs, method="none", max_new_tokens=20)
    with pytest.raises(ConversationError, match="has not ended"):
        _ = stream.answer
    pieces = list(stream)
    assert "".join(pieces) == stream.answer.text
    assert stream.answer.stop_reason in ("end", "length")
    whole = engine.model.tokenizer.decode(stream.answer.token_ids, skip_special_tokens=True)
    assert stream.answer.text == whole
    with pytest.raises(InputError, match=r"^question"):
        engine.stream("  ", docs)
    assert engine.ask(QUESTION, docs, method="none", max_new_tokens=20).token_ids == stream.answer.token_ids


def test_every_way_an_answer_ends(engine: Engine) -> None:
    docs = documents()
    long = engine.ask(QUESTION, docs, method="full", max_new_tokens=40)
    limited = engine.ask(QUESTION, docs, method="full", max_new_tokens=3)
    assert (limited.stop_reason, limited.token_ids) == ("length", long.token_ids[:3])
    first_three = engine.model.tokenizer.decode(long.token_ids[:3], skip_special_tokens=True)
    marker = long.text[len(first_three) : len(first_three) + 2]
    stopped = engine.ask(QUESTION, docs, method="full", max_new_tokens=40, stop=[marker])
    assert stopped.stop_reason == "stop"
    assert stopped.text == long.text[: long.text.index(marker)]
    assert marker not in stopped.text


def test_the_end_token_ends_the_answer_and_is_not_part_of_it(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    docs = documents()
    free = engine.ask(QUESTION, docs, method="full", max_new_tokens=6)
    at = next(n for n in range(6) if free.token_ids[n] not in free.token_ids[:n] and n)
    monkeypatch.setattr(engine.model, "stop_ids", frozenset({free.token_ids[at]}))
    answer = engine.ask(QUESTION, docs, method="full", max_new_tokens=6)
    assert (answer.stop_reason, answer.token_ids) == ("end", free.token_ids[:at])
    monkeypatch.setattr(engine.model, "stop_ids", frozenset({free.token_ids[0]}))
    empty = engine.ask(QUESTION, docs, method="full", max_new_tokens=6)
    assert (empty.stop_reason, empty.token_ids, empty.text) == ("end", (), "")
    assert empty.follow_up("And then?").prompt_tokens > empty.prompt_tokens


def test_a_seed_makes_sampling_repeatable(engine: Engine) -> None:
    docs = documents(2)

    def ids(**options: Any) -> tuple[int, ...]:
        return engine.ask(QUESTION, docs, method="none", temperature=2.0, max_new_tokens=12, **options).token_ids

    assert ids(seed=3) == ids(seed=3)
    assert ids(seed=3) != ids(seed=4)
    assert ids(seed=3, top_k=1) == engine.ask(QUESTION, docs, method="none", max_new_tokens=12).token_ids


def _ask(engine: Engine, docs: list[Document]) -> None:
    engine.ask(QUESTION, docs, method="none")


def _stream(engine: Engine, docs: list[Document]) -> None:
    list(engine.stream(QUESTION, docs, method="retrieved-document"))


def _cancel(engine: Engine, docs: list[Document]) -> None:
    stream = engine.stream(QUESTION, docs, method="none")
    next(stream)
    stream.cancel()
    stream.cancel()
    assert stream.answer.stop_reason == "cancelled"
    with pytest.raises(ConversationError):
        stream.answer.follow_up("And?")


def _leave(engine: Engine, docs: list[Document]) -> None:
    for _ in engine.stream(QUESTION, docs, method="none"):
        break  # the stream is dropped here, not closed


def _never_start(engine: Engine, docs: list[Document]) -> None:
    engine.stream(QUESTION, docs, method="none").cancel()


def _context(engine: Engine, docs: list[Document]) -> None:
    with engine.stream(QUESTION, docs, method="none") as stream:
        next(stream)


def _refused(engine: Engine, docs: list[Document]) -> None:
    with pytest.raises(InputError):
        engine.ask(QUESTION, docs, method="nothing")


@pytest.mark.parametrize("deed", [_ask, _stream, _cancel, _leave, _never_start, _context, _refused])
def test_stored_bytes_and_hooks_are_as_before(on_disk: Engine, deed: Callable[[Engine, list[Document]], None]) -> None:
    engine, docs = on_disk, documents()
    _ask(engine, docs)
    before = stored_bytes(engine)
    assert len(before) == 5
    deed(engine, docs)
    assert stored_bytes(engine) == before
    at_rest(engine, conversations=1)


@pytest.mark.parametrize("forward", [1, 2, 4])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_error_inside_the_model_leaves_nothing_behind(
    on_disk: Engine, monkeypatch: pytest.MonkeyPatch, forward: int, kind: type[BaseException]
) -> None:
    engine, docs = on_disk, documents()
    truth = engine.ask(QUESTION, docs, method="none")
    before = stored_bytes(engine)
    Failing(engine.model, monkeypatch).at(forward, kind)
    stream = engine.stream(QUESTION, docs, method="none")
    with pytest.raises(kind, match="planted"):
        list(stream)
    with pytest.raises(ConversationError):
        _ = stream.answer
    assert current_plan() is None
    assert stored_bytes(engine) == before
    at_rest(engine, conversations=1)
    assert engine.ask(QUESTION, docs, method="none").token_ids == truth.token_ids


@pytest.mark.parametrize("poisoned", [0, 2])
def test_nan_logits_are_an_error_and_never_text(engine: Engine, monkeypatch: pytest.MonkeyPatch, poisoned: int) -> None:
    head = engine.model.hf.get_output_embeddings()
    forward, calls = head.forward, []

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        out = forward(hidden)
        return out * float("nan") if len(calls) > poisoned else out

    monkeypatch.setattr(head, "forward", broken)
    stream = engine.stream(QUESTION, documents(), method="none")
    pieces: list[str] = []
    with pytest.raises(NumericsError, match="tiny-llama produced NaN"):
        pieces.extend(stream)
    assert len(pieces) <= poisoned
    with pytest.raises(ConversationError):
        _ = stream.answer
    at_rest(engine)


def test_two_hundred_requests_some_cancelled_some_failing_leave_nothing(
    on_disk: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 20."""
    engine, docs = on_disk, documents(4, 40)
    truth = engine.ask(QUESTION, docs, method="none", max_new_tokens=2).token_ids
    before = stored_bytes(engine)
    failing = Failing(engine.model, monkeypatch)
    for n in range(200):
        if n % 3 == 0:
            stream = engine.stream(QUESTION, docs, method="none", max_new_tokens=2)
            next(stream)
            stream.cancel()
        elif n % 10 == 1:
            failing.at(1 + n % 2)
            with pytest.raises(RuntimeError, match="planted"):
                engine.ask(QUESTION, docs, method="none", max_new_tokens=2)
        else:
            assert engine.ask(QUESTION, docs, method="none", max_new_tokens=2).token_ids == truth
    assert stored_bytes(engine) == before
    at_rest(engine, conversations=1)
    memory = engine.store.stats()["memory"]
    assert memory.bytes >= sum(row.tokens for row in engine.store.ls()) * engine.model.bytes_per_token


# conversations


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_a_follow_up_equals_asking_the_whole_conversation_at_once(family: str, nan_slots: None) -> None:
    engine, docs = make_engine(family), documents(2)
    tokenizer = engine.model.tokenizer
    ids = list(prompt_ids(engine, docs))
    answer = engine.ask(QUESTION, docs, method="full", max_new_tokens=5)
    for question in ("And then?", "Why " + "so " * 60 + "long?"):
        ids += [*answer.token_ids, *continuation(tokenizer, question).ids(tokenizer)]
        answer = answer.follow_up(question, max_new_tokens=5)
        assert answer.prompt_tokens == len(ids)
        assert list(answer.token_ids) == greedy(family, tuple(ids), 5)
        ledger = answer.ledger
        assert sum(ledger.tokens.values()) == len(ids)
        assert ledger.tokens[Provenance.EXACT] + ledger.tokens[Provenance.INLINE] == len(ids)
        assert ledger.forward_tokens["read"] == ledger.tokens[Provenance.INLINE] < len(ids)
    at_rest(engine, conversations=1)
    engine.close()
    assert engine.model.pool.lent == 0


def test_a_follow_up_can_be_asked_once_and_not_after_a_release(engine: Engine) -> None:
    docs = documents(2)
    answer = engine.ask(QUESTION, docs, method="none")
    answer.follow_up("And?")
    with pytest.raises(ConversationError, match="continued already"):
        answer.follow_up("And?")
    one = engine.ask(QUESTION, docs, method="none")
    two = engine.ask(QUESTION, docs, method="none")
    with pytest.raises(ConversationError, match="released"):
        one.follow_up("And?")
    assert two.follow_up("And?").token_ids is not None
    at_rest(engine, conversations=1)


def test_several_conversations_live_side_by_side() -> None:
    engine, docs = make_engine(conversations=3), documents(3)
    answers = [engine.ask(QUESTION, docs[n : n + 1], method="full") for n in range(3)]
    assert engine.model.pool.lent == 3
    again = [a.follow_up("And?").token_ids for a in answers]
    alone = []
    for n in range(3):
        alone.append(engine.ask(QUESTION, docs[n : n + 1], method="full").follow_up("And?").token_ids)
    assert again == alone
    engine.close()
    assert engine.model.pool.lent == 0


def test_continuing_the_newest_conversation_keeps_the_older_ones() -> None:
    with make_engine(conversations=2) as engine:
        one, two = (engine.ask(QUESTION, documents(n), method="full") for n in (1, 2))
        for _ in range(3):
            two = two.follow_up("And?")
        assert one.follow_up("And?").text is not None
        at_rest(engine, conversations=2)


def test_an_error_in_a_follow_up_releases_the_conversation(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = engine.ask(QUESTION, documents(2), method="none")
    Failing(engine.model, monkeypatch).at(1)
    with pytest.raises(RuntimeError, match="planted"):
        answer.follow_up("And?")
    assert engine.model.pool.lent == 0
    with pytest.raises(ConversationError):
        answer.follow_up("And?")


def test_a_conversation_beyond_the_context_says_by_how_much(engine: Engine) -> None:
    answer = engine.ask(QUESTION, documents(2), method="none")
    with pytest.raises(InputError, match=r"question: .* \d+ tokens too long"):
        answer.follow_up("word " * 1500)
    assert answer.follow_up("And?").text is not None, "a refused question must not cost the conversation"


# compile


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "phi3-partial"])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_batch_equals_one_by_one(family: str, prefix: bool) -> None:
    docs = [*documents(8, 30), *documents(3, 400)]
    docs = [Document(d.text, id=f"{n}") for n, d in enumerate(docs)]
    together, alone = make_engine(family, shared_prefix=prefix), make_engine(family, shared_prefix=prefix)
    report = together.compile(docs, gate=False)
    for doc in docs:
        alone.compile([doc], gate=False)
    assert report.compiled == len(docs)
    for doc in docs:
        ids = segment_ids(doc, together.model.tokenizer)
        key = together.reader.key(ids, None)
        with together.store.fetch([(key, ids)]) as (one,), alone.store.fetch([(key, ids)]) as (two,):
            assert one.segment is not None
            assert two.segment is not None
            assert torch.allclose(one.segment.keys, two.segment.keys, atol=1e-5)
            assert torch.allclose(one.segment.values, two.segment.values, atol=1e-5)
    together.close()
    alone.close()


def test_compile_reports_what_it_did(on_disk: Engine) -> None:
    engine, docs = on_disk, documents()
    seen: list[tuple[int, int]] = []
    first = engine.compile(docs[:2], gate=False, progress=lambda done, total: seen.append((done, total)))
    assert (first.documents, first.compiled, first.stored_before) == (2, 2, 0)
    assert seen == [(0, 2), (1, 2), (2, 2)]
    seen.clear()
    second = engine.compile(docs, gate=False, progress=lambda done, total: seen.append((done, total)))
    assert (second.compiled, second.stored_before) == (2, 2)
    assert seen == [(2, 4), (3, 4), (4, 4)]
    assert second.tokens == tokens_of(engine, *docs)
    assert second.bytes == second.tokens * engine.model.bytes_per_token
    third = engine.compile(docs, gate=False)
    assert (third.compiled, third.forward_tokens) == (0, 0)


def test_the_same_text_under_two_ids_is_compiled_once_and_counted_twice(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    docs = [Document("one text", id="a"), Document("one text", id="b"), Document("another", id="c")]
    report = engine.compile(docs, gate=False, progress=lambda done, total: seen.append((done, total)))
    assert (report.documents, report.compiled + report.stored_before) == (3, 3)
    assert seen[-1] == (3, 3)
    assert len(stored_bytes(engine)) == 2


@pytest.mark.parametrize("count", [1, 3, 63, 64, 65, 130])
def test_any_number_of_documents_compiles(count: int) -> None:
    engine = make_engine(shared_prefix=False)
    report = engine.compile([Document(f"text {n}", id=str(n)) for n in range(count)], gate=False)
    assert report.compiled == count == len(stored_bytes(engine))
    at_rest(engine)
    engine.close()


@pytest.mark.parametrize("where", ["progress", "model"])
def test_an_interrupted_compile_keeps_what_is_finished_and_resumes(
    on_disk: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine = on_disk
    docs = [Document(d.text, id=f"{n}") for n, d in enumerate([*documents(4, 40), *documents(4, 300)])]

    def stop(done: int, total: int) -> None:
        if where == "progress" and done == 3:
            raise KeyboardInterrupt("planted")

    if where == "model":
        Failing(engine.model, monkeypatch).at(3, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt, match="planted"):
        engine.compile(docs, progress=stop)
    kept = stored_bytes(engine)
    assert 0 < len(kept) < 8
    at_rest(engine)
    report = engine.compile(docs, gate=False)
    assert (report.stored_before, report.compiled) == (len(kept), 8 - len(kept))
    after = stored_bytes(engine)
    assert {name: after[name] for name in kept} == kept
    assert len(after) == 8


def test_the_same_inputs_give_the_same_bytes_in_two_stores(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        with make_engine(directory=tmp_path / name) as engine:
            engine.compile(documents(), gate=False)
            made.append(stored_bytes(engine))
    assert made[0] == made[1]
    assert len(made[0]) == 4


# damage


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def _flip_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(bytes(content))


def _delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [_truncate, _empty, _flip, _flip_header, _delete])
@pytest.mark.parametrize("which", [0, 2, 4])
def test_a_damaged_file_is_compiled_anew_and_the_answer_is_the_same(
    tmp_path: Path, harm: Callable[[Path], None], which: int
) -> None:
    """Cases 19 and 21: first, middle and last of what is loaded; the ledger names it."""
    docs = documents()
    with make_engine(directory=tmp_path) as engine:
        truth = engine.ask(QUESTION, docs, method="none")
        before = stored_bytes(engine)
    names = [
        p for d in docs for p in tmp_path.rglob("*.safetensors")
        if p.stem == engine.reader.key(segment_ids(d, engine.model.tokenizer), None).digest
    ]  # fmt: skip
    [opening] = set(tmp_path.rglob("*.safetensors")) - set(names)
    path = [opening, *names][which]
    harm(path)
    with make_engine(directory=tmp_path) as engine:
        answer = engine.ask(QUESTION, docs, method="none")
        assert answer.token_ids == truth.token_ids
        sources = ["opening", *(d.source for d in answer.ledger.documents)]
        if which:
            assert sources[which] == "compiled"
            assert "was not stored" in answer.ledger.documents[which - 1].why
        assert sources.count("compiled") == (which > 0)
        lost = [f for f in answer.ledger.fallbacks if f.reason == "load_failed"]
        assert len(lost) == (harm is not _delete)
        if lost and which:
            assert docs[which - 1].id in lost[0].detail
        after = stored_bytes(engine)
        assert after.keys() == before.keys()
        changed = {name for name in after if after[name] != before[name]}
        assert changed <= {str(path.relative_to(tmp_path / "v1"))}, "the others were left alone"
        at_rest(engine, conversations=1)
        again = engine.ask(QUESTION, docs, method="none").ledger
        assert again.forward_tokens["compile"] == 0
        assert not again.fallbacks


def test_two_swapped_files_are_two_misses(tmp_path: Path) -> None:
    docs = documents()
    with make_engine(directory=tmp_path) as engine:
        truth = engine.ask(QUESTION, docs, method="none")
    one, two = sorted(tmp_path.rglob("*.safetensors"))[:2]
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with make_engine(directory=tmp_path) as engine:
        answer = engine.ask(QUESTION, docs, method="none")
        assert answer.token_ids == truth.token_ids
        assert [f.reason for f in answer.ledger.fallbacks] == ["load_failed", "load_failed"]


@pytest.mark.parametrize("which", [0, 1, 3])
def test_a_load_that_raises_is_a_miss_of_that_segment_alone(
    on_disk: Engine, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    engine, docs = on_disk, documents()
    truth = engine.ask(QUESTION, docs, method="none")
    before = stored_bytes(engine)
    engine.store.clear_memory()
    assert engine.store.disk is not None
    key = engine.reader.key(segment_ids(docs[which], engine.model.tokenizer), None)
    get = engine.store.disk.get

    def failing(wanted: Any, *rest: Any) -> Any:
        if wanted == key:
            raise OSError(5, "planted")
        return get(wanted, *rest)

    monkeypatch.setattr(engine.store.disk, "get", failing)
    answer = engine.ask(QUESTION, docs, method="none")
    assert answer.token_ids == truth.token_ids
    [fallback] = answer.ledger.fallbacks
    assert fallback.reason == "load_failed"
    assert docs[which].id in fallback.detail
    assert "unreadable" in fallback.detail
    after = stored_bytes(engine)
    assert after.keys() == before.keys()
    changed = {name for name in after if after[name] != before[name]}
    assert changed <= {name for name in after if key.digest in name}, "the others were left alone"
    at_rest(engine, conversations=1)


# small promises


def test_the_engine_is_a_context_manager_and_gives_all_back() -> None:
    with make_engine() as engine:
        engine.ask(QUESTION, documents(1), method="full")
        assert engine.model.pool.lent == 1
    assert engine.model.pool.lent == 0


def test_a_stream_left_unread_computes_nothing(engine: Engine) -> None:
    stream = engine.stream(QUESTION, documents(), method="full")
    assert engine.model.pool.lent == 0
    stream.cancel()
    assert stream.answer.stop_reason == "cancelled"
    assert stream.answer.token_ids == ()


def test_place_of_the_target_is_a_pure_function_of_the_runs(engine: Engine) -> None:
    runs = engine.prompt(QUESTION, documents()).runs(engine.model.tokenizer)
    one, two = place_runs(runs, Order.TARGET_LAST, (0,)), place_runs(runs, Order.TARGET_LAST, (0,))
    assert one == two
    assert one.tokens == place_runs(runs).tokens


def test_a_model_without_a_template_is_asked_in_plain_text() -> None:
    tokenizer = byte_level()
    model = LanguageModel.wrap(build("llama", vocab_size=len(tokenizer)), tokenizer, "plain", "plain")
    engine, docs = make_engine(model), documents(2)
    answer = engine.ask(QUESTION, docs, method="full", max_new_tokens=3)
    text = tokenizer.decode(engine.prompt(QUESTION, docs).ids(tokenizer))
    assert text.endswith(f"\nQuestion: {QUESTION}\nAnswer:")
    assert answer.follow_up("And?", max_new_tokens=3).prompt_tokens > answer.prompt_tokens
    engine.close()


def test_the_settings_policy_holds_for_a_named_method() -> None:
    settings = SETTINGS.model_copy(update={"policy": "auto"})
    with Engine(tiny(), Store.open(None, 1 << 28), settings) as engine:
        ledger = engine.ask(QUESTION, documents(2), method="none").ledger
    assert ledger.method == "full"
    assert [f.reason for f in ledger.fallbacks] == ["no_verdict"]


def test_a_template_without_a_system_role_carries_the_system_text_in_the_user_turn() -> None:
    tokenizer = byte_level(bos="<s>", template=GEMMA)
    tokenizer.eos_token = "<end_of_turn>"
    hf = build("llama", vocab_size=len(tokenizer))
    model = LanguageModel.wrap(hf, tokenizer, "no-system", "w")
    engine = Engine(model, Store.open(None, 1 << 28), SETTINGS, system="Be kind.")
    prompt = engine.prompt("Why?", documents(1))
    assert "Be kind." in "".join(p.text for p in prompt.parts)
    assert engine.ask("Why?", documents(2), method="none", max_new_tokens=2).ledger.tokens["exact"] > 0


def test_a_writer_that_alters_documents_never_earns_exact() -> None:
    class Altered(Isolated):
        @property
        def encoded_behind(self) -> None:
            return None

    engine = Engine(tiny(), Store.open(None, 1 << 28), SETTINGS)
    altered = dataclasses.replace(engine.reader, writer=Altered())
    placement = place_runs([Run((5, 6, 7), documents(1)[0]), Run((9, 8))])
    ledger = Ledger()
    _, cache = altered.read(placement, METHODS["none"], None, ledger, 0)
    engine.model.pool.release(cache)
    assert ledger.documents[0].provenance == Provenance.REUSED


def test_seconds_in_all_are_never_less_than_to_the_first_token(engine: Engine) -> None:
    seconds = engine.ask(QUESTION, documents(2), method="none", max_new_tokens=1).ledger.seconds
    assert seconds["total"] >= seconds["first_token"]
