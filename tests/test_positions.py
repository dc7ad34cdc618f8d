"""Placements cover every token once, and moved keys are the keys that would have been computed there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, Phi3Config, PreTrainedModel, StableLmConfig

from kvquilt import Document, Prompt
from kvquilt.errors import ContextLengthError
from kvquilt.ledger import Ledger
from kvquilt.model.language_model import LanguageModel
from kvquilt.placement import Order, place_runs
from kvquilt.prompt import Run
from kvquilt.reading import Reader
from kvquilt.repair.presets import find_method
from kvquilt.segment import CompiledSegment, place
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.engines import AFFORDABLE, make_engine
from tests.models import FAMILIES, build, model_from, tiny
from tests.oracle import random_document, random_ids, stock
from tests.repair.methods import SLOTTED, wrapped
from tests.tokenizers import chatml_tokenizer
from tests.writers.trained import random_writers

_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip
OTHERS: dict[str, functools.partial[PreTrainedModel]] = {
    "llama-dynamic": functools.partial(
        build, "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "stablelm-quarter": functools.partial(model_from, StableLmConfig, {"pad_token_id": 0}),
    "phi3-longrope": functools.partial(
        model_from, Phi3Config,
        {"pad_token_id": 0, "original_max_position_embeddings": 128, "rope_parameters": _LONGROPE},
    ),
}  # fmt: skip
MOVES = (1, 37, 1000)


@functools.cache
def other(name: str) -> LanguageModel:
    return LanguageModel.wrap(OTHERS[name](), chatml_tokenizer(), f"tiny-{name}", name)


@torch.inference_mode()
def keys_at(hf: PreTrainedModel, ids: tuple[int, ...], position: int) -> torch.Tensor:
    """Keys ``[layers, heads, tokens, dim]`` of a stock forward at `position`, nothing before it."""
    cache = DynamicCache()
    positions = torch.arange(position, position + len(ids))[None]
    hf.base_model(input_ids=torch.tensor([ids]), position_ids=positions, cache=cache, use_cache=True)
    return torch.stack([layer.keys[0] for layer in cache.layers])


def segment_of(model: LanguageModel, ids: tuple[int, ...], prefix: tuple[int, ...] = ()) -> CompiledSegment:
    [(_, segment)] = Isolated(prefix).compile(model, [ids])
    return segment


def moved(model: LanguageModel, segment: CompiledSegment, position: int) -> torch.Tensor:
    out = torch.full_like(segment.keys, float("nan"))
    place(segment, position, model.capability.tables, out)
    return out


def error(measured: torch.Tensor, truth: torch.Tensor) -> float:
    return float((measured - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_moved_keys_equal_keys_computed_there(family: str, move: int) -> None:
    ids = random_ids(20, 1)
    segment = segment_of(tiny(family), ids)
    assert error(moved(tiny(family), segment, move), keys_at(stock(family), ids, move)) < 2e-4
    assert error(segment.keys, keys_at(stock(family), ids, move)) > 1e-2, "nothing moves here"


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", OTHERS)
def test_a_table_that_changes_with_length_moves_below_its_bound_and_is_refused_above(name: str, move: int) -> None:
    """The rest of the RoPE types: exact where the table is one and the same, a typed error naming the type beyond."""
    model, ids = other(name), random_ids(20, 1)
    limit = model.capability.max_length
    if move + len(ids) <= limit:
        assert error(moved(model, segment_of(model, ids), move), keys_at(OTHERS[name](), ids, move)) < 2e-4
        return
    engine = make_engine(model)
    words = " ".join(["word"] * move)
    with pytest.raises(ContextLengthError, match=rf"(?s){limit}.*{model.capability.rope[0]}"):
        engine.ask("What?", [Document(words, id="long")], method="none")
    assert model.pool.lent == 0


def test_the_dynamic_table_is_refused_past_its_length() -> None:
    engine = make_engine(other("llama-dynamic"))
    text = " ".join(["word"] * 1500)
    with pytest.raises(ContextLengthError, match=r"(?s)1024.*dynamic RoPE"):
        engine.ask(Prompt(["Read this.\n", Document(text), "\nWhat?"]), method="none")
    with pytest.raises(ContextLengthError, match="dynamic RoPE"):
        engine.compile([Document(text, id="long")], gate=False)


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "gemma3", "phi3-partial"])
def test_twenty_placements_are_each_one_move_from_the_stored_frame(family: str) -> None:
    model, ids = tiny(family), random_ids(12, 2)
    for prefix in ((), random_ids(9, 3)):
        segment = segment_of(model, ids, prefix)
        before = segment.keys.clone()
        for position in range(0, 1000, 50):
            truth = keys_at(stock(family), (*prefix, *ids), position)[:, :, len(prefix) :]
            assert error(moved(model, segment, position + len(prefix)), truth) < 2e-4
        assert torch.equal(segment.keys, before)
        assert torch.equal(moved(model, segment, segment.start), before), "a segment in its own place is copied"


def test_half_precision_keys_are_rotated_in_fp32_and_cast_once() -> None:
    segment = segment_of(tiny(), random_ids(12, 2))
    half = CompiledSegment(segment.ids, segment.keys.bfloat16(), segment.values.bfloat16())
    wide = CompiledSegment(segment.ids, half.keys.float(), half.values.float())
    assert torch.equal(moved(tiny(), half, 613), moved(tiny(), wide, 613).bfloat16())


parts = st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=8)
edits = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "move", "repeat"]), st.integers(0, 20), st.integers(0, 20),
        st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 5)),
    ),
    max_size=8,
)  # fmt: skip


def run_of(part: tuple[bool, int, int]) -> Run:
    is_document, length, seed = part
    return Run(*random_document(length, seed, f"{length}-{seed}")) if is_document else Run(random_ids(length, seed))


def edited(runs: list[Run], edit: tuple[str, int, int, tuple[bool, int, int]]) -> list[Run]:
    verb, first, second, part = edit
    runs = list(runs)
    if verb == "insert" or not runs:
        runs.insert(first % (len(runs) + 1), run_of(part))
    elif verb == "delete" and len(runs) > 1:
        runs.pop(first % len(runs))
    elif verb == "move":
        runs.insert(second % len(runs), runs.pop(first % len(runs)))
    elif verb == "repeat":
        runs.insert(second % len(runs), runs[first % len(runs)])
    return runs


@settings(max_examples=60, deadline=None)
@given(parts, edits, st.integers(0, 20))
def test_any_edit_leaves_a_placement_without_gaps_or_overlap(
    start: list[tuple[bool, int, int]], script: list[Any], pick: int
) -> None:
    runs = [run_of(part) for part in start]
    for step in [None, *script]:
        runs = edited(runs, step) if step is not None else runs
        held = [run for run in runs if run.document is not None]
        target = pick % len(held) if held else None
        for order in Order:
            placement = place_runs(runs, order, () if target is None else (target,))
            spans = [slot for i in range(len(placement.runs)) for slot in placement.span(i)]
            assert spans == list(range(placement.tokens))
            assert placement.ids == tuple(i for run in placement.runs for i in run.ids)
            assert sorted(map(id, placement.runs)) == sorted(map(id, runs))
            inline = [i for i, run in enumerate(runs) if run.document is None]
            if order is Order.DOCUMENTS_FIRST:
                assert placement.documents() == list(range(len(held)))
            else:
                assert [placement.runs[i] for i in inline] == [runs[i] for i in inline], "inline text was moved"
            view = placement.view()
            assert (view is None) == (order is not Order.SHARED_POSITIONS)
            if view is not None:
                assert int(view.at(torch.tensor(placement.tokens))) == placement.end <= placement.tokens
            if order is Order.TARGET_LAST and target is not None:
                assert placement.runs[placement.documents()[-1]] is held[target]
                rest = [placement.runs[i] for i in placement.documents()[:-1]]
                assert list(map(id, rest)) == list(map(id, held[:target] + held[target + 1 :]))


@settings(max_examples=15, deadline=None)
@given(parts, edits)
def test_provenance_covers_every_token_once_after_any_edit(
    start: list[tuple[bool, int, int]], script: list[Any]
) -> None:
    model = tiny()
    trained = random_writers(model)
    reader = Reader(model, Store.open(None, 1 << 28), Isolated(), (), helper=tiny(seed=1), trained=trained)
    runs = [run_of(part) for part in start]
    for step in script:
        runs = edited(runs, step)
    for method in (find_method(AFFORDABLE[name]) for name in SLOTTED):
        held = [i for i, run in enumerate(runs) if run.document is not None]
        ranking = (0,) if held and method.needs_ranking else ()
        placement = place_runs(runs, method.order, ranking)
        ledger = Ledger()
        _, cache = reader.read(placement, method, None, ledger, 0)
        model.pool.release(cache)
        assert sum(ledger.tokens.values()) == placement.tokens
        placed = wrapped(reader, placement, method)
        assert [(d.start, d.tokens) for d in ledger.documents] == [
            (placed.positions[i] + len(placed.runs[i].header), len(placed.runs[i].ids)) for i in placed.documents()
        ]
        assert ledger.soft_rows == placed.tokens - placement.tokens
