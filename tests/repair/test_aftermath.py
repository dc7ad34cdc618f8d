"""What every method leaves behind, whatever happened to it: stored bytes, hooks, plans, lent slots, live caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import pytest
import torch

from kvquilt import Document, Engine
from kvquilt.errors import ConversationError, IntegrityError, NumericsError
from kvquilt.ledger import Provenance
from kvquilt.model.rows import current_plan
from kvquilt.prompt import continuation
from kvquilt.repair.presets import METHODS
from tests.engines import QUESTION, at_rest, documents, make_engine, stored_bytes
from tests.models import tiny
from tests.oracle import runs_of
from tests.repair.methods import SLOTTED, ordered, read, reader_of, roomy, small

methods = pytest.mark.parametrize("name", METHODS)


def written(name: str) -> str:
    """As a caller writes it, with a budget that pays for its probe in a model of three layers, but not for all rows."""
    return f"{name}:70%" if METHODS[name].budget is not None else name


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = make_engine(directory=tmp_path, helper=small(), trained=True)
    yield made
    made.close()
    assert tiny().pool.lent == 0
    assert small().pool.lent == 0
    assert current_plan() is None


class Planted(RuntimeError):
    """What the tests throw inside a layer."""


def throw_inside(layer: torch.nn.Module, call: int) -> Callable[[], None]:
    """The layer's attention raises at its `call`-th call from now; returns what takes the fault out again."""
    calls = 0

    def fail(module: torch.nn.Module, args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Planted("planted")

    return layer.self_attn.register_forward_pre_hook(fail).remove


@methods
def test_stored_bytes_are_as_before_whatever_is_asked(engine: Engine, name: str) -> None:
    """T5: ask, stream, abort, follow up, ask in another order: a segment never changes once it is stored."""
    docs, method = documents(3), written(name)
    engine.ask(QUESTION, docs, method=method, max_new_tokens=3)
    before = stored_bytes(engine)
    engine.ask(QUESTION, docs, method=method, max_new_tokens=3).follow_up("And?", max_new_tokens=2)
    stream = engine.stream(QUESTION, docs, method=method)
    next(stream)
    stream.cancel()
    engine.stream(QUESTION, docs, method=method).cancel()
    assert stored_bytes(engine) == before
    engine.ask(QUESTION, docs[::-1], method=method, max_new_tokens=2)
    after = stored_bytes(engine)
    assert {key: after[key] for key in before if key in after} == {k: v for k, v in before.items() if k in after}
    assert set(before) <= set(after) or METHODS[name].writer, "only a recipe gives segments up"
    at_rest(engine, conversations=1)


@methods
def test_an_error_inside_a_layer_leaves_nothing_behind(engine: Engine, name: str) -> None:
    """At every forward of the request, in the first and in the last layer."""
    docs, method = documents(3), written(name)
    for _ in range(2):
        truth = engine.ask(QUESTION, docs, method=method, max_new_tokens=2)
    before = stored_bytes(engine)
    layers = engine.model.hf.base_model.layers
    thrown = 0
    for layer in (layers[0], layers[-1]):
        for call in (1, 2, 3):
            take_out = throw_inside(layer, call)
            try:
                engine.ask(QUESTION, docs, method=method, max_new_tokens=2)
            except Planted:
                thrown += 1
            finally:
                take_out()
            assert current_plan() is None
            assert not any("forward" in each.__dict__ for each in layers)
            engine.model.pool.check_integrity()
            at_rest(engine, conversations=engine.model.pool.lent)
    assert thrown >= 2, "no fault was reached"
    assert stored_bytes(engine) == before
    again = engine.ask(QUESTION, docs, method=method, max_new_tokens=2)
    assert (again.token_ids, again.ledger.spending) == (truth.token_ids, truth.ledger.spending)


@methods
def test_poisoned_keys_are_an_error_and_not_an_answer(engine: Engine, name: str) -> None:
    """NaN from inside the pass ends in a typed error, and the slots go back."""
    docs, method = documents(3), written(name)
    engine.ask(QUESTION, docs, method=method, max_new_tokens=1)

    def poison(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * float("nan")

    handle = engine.model.hf.base_model.layers[-1].mlp.register_forward_hook(poison)
    try:
        with pytest.raises(NumericsError):
            engine.ask(QUESTION, docs, method=method, max_new_tokens=1)
    finally:
        handle.remove()
    at_rest(engine, conversations=1)


@methods
def test_the_live_cache_of_any_method_is_refused_by_generate(engine: Engine, name: str) -> None:
    """Case 9: a cache with rows of its own cannot be continued by somebody else's loop."""
    answer = engine.ask(QUESTION, documents(3), method=written(name), max_new_tokens=2)
    cache = answer.take_cache()
    try:
        with pytest.raises(IntegrityError, match="cannot be passed to generate"):
            engine.model.hf.generate(
                input_ids=torch.tensor([[5]]), attention_mask=torch.ones(1, cache.filled + 1, dtype=torch.int64),
                cache=cache, max_new_tokens=2, do_sample=False, pad_token_id=0,
            )  # fmt: skip
    finally:
        engine.model.pool.release(cache)


def followed(engine: Engine, docs: list[Document], method: str, questions: list[str]) -> list[int]:
    """Greedy answers to follow-ups, by feeding their tokens one at a time behind the first answer's cache."""
    answer = engine.ask(QUESTION, docs, method=method, max_new_tokens=3)
    model, out, tokens = engine.model, list[int](), answer.ledger.tokens
    cache = answer.take_cache()
    held = sum(tokens.values()) - tokens[Provenance.ABSENT] + answer.ledger.soft_rows  # slots of the prompt
    pending = [*answer.token_ids[cache.filled - held :]]
    try:
        for question in questions:
            new = [*pending, *continuation(model.tokenizer, question).ids(model.tokenizer)]
            cache = model.pool.grow(cache, cache.filled + len(new) + 3)
            for token in new:
                logits = model.forward(torch.tensor([[token]]), cache.tail(1), cache)
            answered: list[int] = []
            while (token := int(logits[0, -1].argmax())) not in model.stop_ids:
                answered.append(token)
                if len(answered) == 3:
                    break
                logits = model.forward(torch.tensor([[token]]), cache.tail(1), cache)
            out += answered
            pending = answered[-1:] if len(answered) == 3 else []
    finally:
        model.pool.release(cache)
    return out


@pytest.mark.parametrize("name", SLOTTED)
def test_a_follow_up_continues_the_repaired_prompt(engine: Engine, name: str) -> None:
    """Two turns behind every method equal the same tokens fed one by one behind the same cache."""
    docs, method, questions = documents(3), written(name), ["And then?", "Why is that so?"]
    engine.ask(QUESTION, docs, method=method, max_new_tokens=3)  # what is compiled is compiled
    truth = followed(engine, docs, method, questions)
    first = answer = engine.ask(QUESTION, docs, method=method, max_new_tokens=3)
    told, tokens = list[int](), first.prompt_tokens
    for question in questions:
        asked = continuation(engine.model.tokenizer, question).ids(engine.model.tokenizer)
        tokens += len(answer.token_ids) + len(asked)
        answer = answer.follow_up(question, max_new_tokens=3)
        told += answer.token_ids
        assert answer.prompt_tokens == sum(answer.ledger.tokens.values()) == tokens
        assert answer.ledger.tokens[Provenance.ABSENT] == first.ledger.tokens[Provenance.ABSENT]
    assert told == truth
    with pytest.raises(ConversationError):
        first.follow_up("And?")
    at_rest(engine, conversations=1)


@methods
def test_every_order_of_four_stored_documents_behind_one_token(name: str) -> None:
    """T9: a question of one token, everything stored: an answer in every order, and the same bits twice."""
    *docs, question = runs_of("ABCDi", (9, 6, 12, 5, 1))
    reader, method = reader_of(), roomy(METHODS[name])
    for order in permutations(docs):
        placement = ordered([*order, question], method)
        out, ledger = read(reader, placement, method)
        if ledger.forward_tokens["compile"]:  # what a recipe wants of this order is stored by now
            out, ledger = read(reader, placement, method)
        assert ledger.forward_tokens["compile"] == 0
        assert ledger.forward_tokens["probe"] + ledger.forward_tokens["read"] >= 1
        assert bool(torch.isfinite(out).all())
    again, _ = read(reader, placement, method)
    assert torch.equal(again, out)


@pytest.mark.parametrize("written", ["full", "full:order=documents_first", "full:order=target_last"])
def test_what_follows_full_prefill_follows_exact_tokens(engine: Engine, written: str) -> None:
    """Full prefill with options is full prefill still."""
    answer = engine.ask(QUESTION, documents(3), method=written, max_new_tokens=2).follow_up("And?", max_new_tokens=1)
    tokens = answer.ledger.tokens
    assert tokens[Provenance.REUSED] == 0
    assert tokens[Provenance.EXACT] + tokens[Provenance.INLINE] == answer.prompt_tokens
