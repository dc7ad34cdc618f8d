"""Kept blocks: the rest is out of attention, and positions stay those of the whole prompt (NVIDIA/kvpress#16)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.errors import ContextLengthError, InputError
from kvquilt.ledger import Ledger, Provenance, Spending
from kvquilt.model.rows import SlotView
from kvquilt.model.slots import SlotCache
from kvquilt.placement import place_runs
from kvquilt.prompt import continuation
from kvquilt.reading import Reader
from kvquilt.repair.budget import Budget
from kvquilt.repair.kept_blocks import KeptBlocks
from kvquilt.repair.presets import Method, find_method
from kvquilt.repair.scene import Scene
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.engines import QUESTION, at_rest, documents, make_engine
from tests.models import tiny
from tests.oracle import close, full_prefill, random_ids, runs_of, stock
from tests.repair.attending import agree, weights
from tests.repair.passes import inline_spans, placed
from tests.repair.tokenwise import Slots, walk

PLACEMENT = place_runs(runs_of("iABiCi", (3, 17, 15, 2, 30, 4)))  # longer than gemma3's window of 24
DOCUMENTS = torch.cat([torch.arange(s.start, s.stop) for s in map(PLACEMENT.span, PLACEMENT.documents())])
INLINE = 9
families = pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])


def method(budget: int | None, selector: KeptBlocks) -> Method:
    given = None if budget is None else Budget(token_layers=budget)
    return dataclasses.replace(find_method("samkv"), selector=selector, budget=given)


def blocks_of(size: int) -> list[range]:
    spans = [PLACEMENT.span(i) for i in PLACEMENT.documents()]
    return [range(a, min(a + size, s.stop)) for s in spans for a in range(s.start, s.stop, size)]


def at_positions(family: str, ids: tuple[int, ...], positions: list[int]) -> torch.Tensor:
    """Logits ``[tokens, vocabulary]`` of a stock model over a cache of just these tokens, each at its position."""
    hf = stock(family)
    computed = torch.ones(hf.config.num_hidden_layers, len(ids), dtype=torch.bool)
    empty: Slots = [(torch.zeros(2, len(ids), 16), torch.zeros(2, len(ids), 16)) for _ in range(len(computed))]
    out, _ = walk(hf, ids, empty, computed, positions=positions)
    return torch.stack([out[n] for n in range(len(ids))])


def positions_of(cache: SlotCache) -> list[int]:
    assert isinstance(cache.view, SlotView)
    return cache.view.at(torch.arange(cache.filled)).tolist()


@families
def test_blocks_rank_by_their_attention_behind_first_and_last_ones(family: str) -> None:
    """The question sees the first and last blocks on its way, and scores them all."""
    blocks = blocks_of(4)
    lengths = [5, 4, 8]  # blocks of the three documents
    outer = [n in (0, count - 1) for count in lengths for n in range(count)]
    seen = ~torch.isin(torch.arange(PLACEMENT.tokens), DOCUMENTS)
    for block, is_outer in zip(blocks, outer, strict=True):
        seen[block.start : block.stop] |= is_outer
    received = weights(family, PLACEMENT, DOCUMENTS.tolist(), seen.expand(3, -1)).mean((0, 1, 2))
    totals = [float(received[b.start : b.stop].sum()) for b in blocks]
    order = sorted(range(len(blocks)), key=lambda n: (not outer[n], -totals[n]))
    model, selector = tiny(family), KeptBlocks(block=4)
    scene = Scene(model, PLACEMENT, PLACEMENT.documents(), inline_spans(PLACEMENT), cache=placed(model, PLACEMENT))
    assert scene.cache is not None
    try:
        choice = selector.choose(scene)
        scores = selector._question.scores(scene, seen)
    finally:
        model.pool.release(scene.cache)
    assert agree(scores, received[DOCUMENTS])
    assert choice.ranking.tolist() == [slot for n in order for slot in blocks[n]]
    assert choice.drop_rest


@families
def test_logits_are_those_of_a_cache_of_the_kept_tokens_at_their_positions(family: str) -> None:
    model, selector = tiny(family), KeptBlocks(block=4)
    reader, ledger = Reader(model, Store.open(None, 1 << 28), Isolated(), ()), Ledger()
    least = selector.least(Scene(model, PLACEMENT, PLACEMENT.documents(), inline_spans(PLACEMENT)))
    out, cache = reader.read(PLACEMENT, method(least + 27 * 3, selector), None, ledger, 0)
    positions = positions_of(cache)
    assert cache.filled == len(positions) == 27 + INLINE < PLACEMENT.tokens == cache.next_position
    ids = tuple(PLACEMENT.ids[p] for p in positions)
    assert close(out, at_positions(family, ids, positions)[-1:])
    assert not close(out, full_prefill(stock(family), PLACEMENT.ids)[-1:])
    assert not close(out, full_prefill(stock(family), ids)[-1:]), "positions closed up"
    more = random_ids(5, 77)  # the next turn, behind the logical end
    out, cache = reader.extend(cache, list(more), "samkv", Ledger(), 0)
    model.pool.release(cache)
    behind = list(range(PLACEMENT.tokens, PLACEMENT.tokens + 5))
    assert close(out, at_positions(family, ids + more, positions + behind)[-1:])
    assert ledger.tokens[Provenance.RECOMPUTED] == 27
    assert ledger.tokens[Provenance.ABSENT] == 62 - 27
    assert ledger.spending == Spending(62, 3, least + 27 * 3, rows=27, probe=least, repair=27 * 3)


def test_an_exact_document_is_kept_though_nothing_is_spent_on_it() -> None:
    model, prefix = tiny(), PLACEMENT.runs[0].ids
    reader, ledger = Reader(model, Store.open(None, 1 << 28), Isolated(prefix), prefix), Ledger()
    selector = KeptBlocks(block=4)
    out, cache = reader.read(PLACEMENT, method(60, selector), None, ledger, 0)
    positions = positions_of(cache)
    model.pool.release(cache)
    assert set(range(20)) <= set(positions)
    assert len(positions) < PLACEMENT.tokens
    assert close(out, at_positions("llama", tuple(PLACEMENT.ids[p] for p in positions), positions)[-1:])
    assert ledger.tokens[Provenance.EXACT] == 20


@families
def test_with_everything_kept_it_is_full_prefill(family: str) -> None:
    model = tiny(family)
    reader, ledger = Reader(model, Store.open(None, 1 << 28), Isolated(), ()), Ledger()
    out, cache = reader.read(PLACEMENT, method(None, KeptBlocks()), None, ledger, 0)
    assert (cache.filled, cache.next_position) == (PLACEMENT.tokens, PLACEMENT.tokens)
    model.pool.release(cache)
    assert close(out, full_prefill(stock(family), PLACEMENT.ids)[-1:])


def test_with_nothing_kept_only_inline_text_is_seen() -> None:
    model, selector = tiny(), KeptBlocks()
    least = selector.least(Scene(model, PLACEMENT, PLACEMENT.documents(), inline_spans(PLACEMENT)))
    reader = Reader(model, Store.open(None, 1 << 28), Isolated(), ())
    out, cache = reader.read(PLACEMENT, method(least, selector), None, Ledger(), 0)
    positions = positions_of(cache)
    model.pool.release(cache)
    assert positions == [p for span in inline_spans(PLACEMENT) for p in span]
    assert close(out, at_positions("llama", tuple(PLACEMENT.ids[p] for p in positions), positions)[-1:])
    with pytest.raises(InputError, match=f"the least possible is {least}"):
        reader.read(PLACEMENT, method(least - 1, selector), None, Ledger(), 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 3), st.integers(0, 62))
def test_the_ranking_goes_block_by_block_and_holds_every_row(size: int, initial: int, local: int, rows: int) -> None:
    model, selector = tiny(), KeptBlocks(size, initial, local)
    scene = Scene(model, PLACEMENT, PLACEMENT.documents(), inline_spans(PLACEMENT), cache=placed(model, PLACEMENT))
    assert scene.cache is not None
    try:
        ranking = selector.choose(scene).ranking.tolist()
    finally:
        model.pool.release(scene.cache)
    assert sorted(ranking) == DOCUMENTS.tolist()
    blocks = {slot: n for n, block in enumerate(blocks_of(size)) for slot in block}
    kept = [blocks[slot] for slot in ranking]
    assert sum(a != b for a, b in pairwise(kept)) == len(set(kept)) - 1, "a block is torn apart"
    head = kept[:rows]
    whole = [n for n in set(head) if head.count(n) == len(blocks_of(size)[n])]
    assert len(set(head)) - len(whole) <= 1, "at most the last one is cut"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_answer_and_follow_up_go_on_behind_the_logical_end(family: str, nan_slots: None) -> None:
    """Both equal greedy decoding of a stock model over the kept tokens at their positions."""
    engine, docs = make_engine(family), documents(3, 60)
    prompt = engine.prompt(QUESTION, docs).ids(engine.model.tokenizer)
    answer = engine.ask(QUESTION, docs, method="samkv:70%,block=8", max_new_tokens=3)
    live = engine._live[0].cache
    assert live is not None
    positions = [p for p in positions_of(live) if p < len(prompt)]
    absent = answer.ledger.tokens[Provenance.ABSENT]
    assert 0 < absent == len(prompt) - len(positions)
    ids = tuple(prompt[p] for p in positions)
    assert follows(family, ids, positions, answer.token_ids, 3)
    following = continuation(engine.model.tokenizer, "And then?").ids(engine.model.tokenizer)
    second = answer.follow_up("And then?", max_new_tokens=3)
    more = (*answer.token_ids, *following)
    behind = [*positions, *range(len(prompt), len(prompt) + len(more))]
    assert follows(family, ids + more, behind, second.token_ids, 3)
    assert sum(second.ledger.tokens.values()) == len(prompt) + len(more)
    assert second.ledger.tokens[Provenance.ABSENT] == absent
    at_rest(engine, conversations=1)
    engine.close()


def test_dropped_tokens_still_take_room_in_the_context() -> None:
    """The limit goes by positions: a follow-up whose slots would fit, but not its positions, is refused."""
    engine, docs = make_engine(), documents(3, 300)
    answer = engine.ask(QUESTION, docs, method="samkv:30%", max_new_tokens=1)
    live = engine._live[0].cache
    assert live is not None
    limit, question = engine.model.capability.max_length, "And then?"
    words = 0
    while live.next_position + len(continuation(engine.model.tokenizer, question).ids(engine.model.tokenizer)) < limit:
        words += 8
        question = "why " * words
    new = len(continuation(engine.model.tokenizer, question).ids(engine.model.tokenizer))
    assert live.filled + new + 10 < limit, "its slots fit"
    with pytest.raises(ContextLengthError):
        answer.follow_up(question, max_new_tokens=4)
    engine.close()


def follows(family: str, ids: tuple[int, ...], positions: list[int], said: Sequence[int], count: int) -> bool:
    """Whether `said` are the most likely next tokens, `count` of them or up to a stop token, each behind the others."""
    end = positions[-1] + 1
    known = at_positions(family, (*ids, *said), [*positions, *range(end, end + len(said))])
    likely = known[len(ids) - 1 :].argmax(-1).tolist()
    stopped = len(said) == count or (len(said) < count and likely[len(said)] in tiny(family).stop_ids)
    return likely[: len(said)] == list(said) and stopped


def test_settings_are_checked() -> None:
    assert find_method("samkv:block=8,initial=2,local=0,layers=-1").selector == KeptBlocks(8, 2, 0, (-1,))
    for option, rule in (("block=0", "at least 1"), ("initial=-1", "at least 0"), ("local=-1", "at least 0")):
        with pytest.raises(InputError, match=rule):
            find_method(f"samkv:{option}")
