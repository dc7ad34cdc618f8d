"""Rows by the question's attention: scores are those of stock models, whatever layers, scope and context count."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger, Spending
from kvquilt.model import attention_rows
from kvquilt.model.language_model import LanguageModel
from kvquilt.placement import Order, Placement, place_runs
from kvquilt.reading import Reader
from kvquilt.repair.budget import Budget
from kvquilt.repair.operator import assemble
from kvquilt.repair.presets import find_method
from kvquilt.repair.question_attention import QuestionAttention
from kvquilt.repair.scene import Scene
from kvquilt.store import Store
from kvquilt.writers.digest import Digest
from kvquilt.writers.isolated import Isolated
from tests.models import build, tiny
from tests.oracle import close, full_prefill, runs_of, stock
from tests.repair.attending import HEADS, LAYERS, agree, weights
from tests.repair.passes import inline_spans, placed
from tests.repair.tokenwise import stored, walk

PLACEMENT = place_runs(runs_of("iABiCi", (3, 17, 15, 2, 30, 4)))  # longer than gemma3's window of 24
DOCUMENTS = torch.cat([torch.arange(s.start, s.stop) for s in map(PLACEMENT.span, PLACEMENT.documents())])
QUESTION = PLACEMENT.span(5)
INLINE = torch.isin(torch.arange(PLACEMENT.tokens), DOCUMENTS).logical_not()
families = pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])


def scene_of(model: LanguageModel, placement: Placement = PLACEMENT) -> Scene:
    return Scene(model, placement, placement.documents(), inline_spans(placement), cache=placed(model, placement))


def scores_of(family: str, selector: QuestionAttention, placement: Placement = PLACEMENT) -> torch.Tensor:
    scene = scene_of(tiny(family), placement)
    try:
        return selector.scores(scene, selector.visible(scene))
    finally:
        assert scene.cache is not None
        scene.model.pool.release(scene.cache)


def read(model: LanguageModel, how: Any, placement: Placement = PLACEMENT) -> tuple[torch.Tensor, Ledger]:
    reader, ledger = Reader(model, Store.open(None, 1 << 28), Isolated(), ()), Ledger()
    out, cache = reader.read(placement, how, None, ledger, 0)
    model.pool.release(cache)
    return out, ledger


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_scores_over_all_are_a_stock_models_attentions(family: str) -> None:
    """Eager attention of transformers over a whole cache that the test has built."""
    inline = INLINE.expand(LAYERS, -1)
    _, after = walk(stock(family), PLACEMENT.ids, stored(stock(family), PLACEMENT), inline)
    cache = DynamicCache()
    for n, (keys, values) in enumerate(after):
        cache.update(keys[None, :, : QUESTION.start], values[None, :, : QUESTION.start], n)
    eager = build(family)
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        out = eager(
            input_ids=torch.tensor([PLACEMENT.ids[QUESTION.start :]]), position_ids=torch.tensor([list(QUESTION)]),
            cache=cache, use_cache=True, output_attentions=True,
        )  # fmt: skip
    truth = torch.cat(out.attentions).double()
    assert truth.shape == (LAYERS, HEADS, len(QUESTION), PLACEMENT.tokens)
    if family == "gemma3":
        assert float(truth[0, :, :, :40].abs().max()) == 0, "a window hides the first documents"
    for layers in ((), (1,), (-2, -1)):
        selector = QuestionAttention(layers=layers, softmax_over="all")
        expected = truth[list(layers)] if layers else truth
        assert agree(scores_of(family, selector), expected.mean((0, 1, 2))[DOCUMENTS])


@families
@pytest.mark.parametrize("over", ["documents", "documents+question", "all"])
def test_weights_sum_to_1_over_the_scope_before_heads_are_reduced(family: str, over: str) -> None:
    scope = {
        "documents": set(DOCUMENTS.tolist()),
        "documents+question": {*DOCUMENTS.tolist(), *QUESTION},
        "all": set(range(PLACEMENT.tokens)),
    }[over]
    truth = weights(family, PLACEMENT, scope)[..., DOCUMENTS]
    options: dict[str, Any] = {"softmax_over": over}
    assert agree(scores_of(family, QuestionAttention(**options)), truth.mean((0, 1, 2)))
    norms = truth[-2:].mean(1).square().sum(1).sqrt().mean(0)
    options["reduce_rows"] = "l2"
    assert agree(scores_of(family, QuestionAttention(layers=(-2, -1), **options)), norms)
    options |= {"reduce_heads": "max", "reduce_rows": "max"}
    assert agree(scores_of(family, QuestionAttention(layers=(0, 2), **options)), truth[[0, 2]].amax((1, 2)).mean(0))


@families
def test_a_question_that_has_seen_no_document(family: str) -> None:
    hidden = INLINE.expand(LAYERS, -1)
    truth = weights(family, PLACEMENT, DOCUMENTS.tolist(), hidden)[-1][..., DOCUMENTS].mean((0, 1))
    blind, seeing = QuestionAttention(context_share=0.0, layers=(-1,)), QuestionAttention(layers=(-1,))
    assert agree(scores_of(family, blind), truth)
    assert not agree(scores_of(family, seeing), truth)


@families
@pytest.mark.parametrize("share", [0.2, 0.1])
def test_a_question_that_sees_digests(family: str, share: float) -> None:
    """Layer by layer the best of what the writer noted; scores are of all rows, seen or not."""
    model, documents = tiny(family), PLACEMENT.documents()
    writer = Isolated(extras=(Digest((7, 8, 9), 0.2),))
    segments = {documents[n]: s for n, s in writer.compile(model, [PLACEMENT.runs[i].ids for i in documents])}
    visible = INLINE.repeat(LAYERS, 1)
    for run, segment in segments.items():
        count = math.ceil(share * segment.tokens - 1e-9)
        for layer in range(LAYERS):
            visible[layer, segment.side["digest"][layer, :count].long() + PLACEMENT.span(run).start] = True
    assert len({tuple(row.tolist()) for row in visible}) == LAYERS, "every layer has a digest of its own"
    selector = QuestionAttention(context_share=share, layers=(1, 2), softmax_over="all")
    cache = assemble(model, PLACEMENT, segments, PLACEMENT.tokens)
    try:
        scene = Scene(model, PLACEMENT, documents, inline_spans(PLACEMENT), segments, cache)
        scores = selector.scores(scene, selector.visible(scene))
        with pytest.raises(InputError, match="its writer noted one of"):
            dataclasses.replace(selector, context_share=0.5).choose(scene)
    finally:
        model.pool.release(cache)
    truth = weights(family, PLACEMENT, range(PLACEMENT.tokens), visible)[[1, 2]]
    assert agree(scores, truth[..., DOCUMENTS].mean((0, 1, 2)))


def test_documents_without_a_digest_are_an_error() -> None:
    with pytest.raises(InputError, match="its writer noted none"):
        read(tiny(), dataclasses.replace(find_method("prophetkv:context_share=0.2"), budget=None))


@families
def test_shared_positions_as_reordering_scores_them(family: str) -> None:
    placement = place_runs(runs_of("iABCi", (3, 17, 15, 30, 4)), Order.SHARED_POSITIONS)
    documents = torch.cat([torch.arange(s.start, s.stop) for s in map(placement.span, placement.documents())])
    truth = weights(family, placement, documents.tolist())[..., documents]
    assert agree(scores_of(family, QuestionAttention(), placement), truth.mean((0, 1, 2)))


def test_blocks_of_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = [{"reduce_rows": rows} for rows in ("mean", "max", "l2")]
    whole = [scores_of("gemma3", QuestionAttention(**o)) for o in options]
    monkeypatch.setattr(attention_rows, "_BLOCK_WEIGHTS", 1)
    for o, scores in zip(options, whole, strict=True):
        assert torch.allclose(scores_of("gemma3", QuestionAttention(**o)), scores, rtol=1e-5, atol=1e-8)


@families
@pytest.mark.parametrize("layers", [(), (0,), (1,), (-1,)])
def test_the_least_budget_buys_the_probe_and_nothing_else(family: str, layers: tuple[int, ...]) -> None:
    model, selector = tiny(family), QuestionAttention(layers=layers)
    last = 2 if not layers else layers[0] % 3
    least = 9 * last + math.ceil(9 * model.projection_share)
    assert selector.least(Scene(model, PLACEMENT, PLACEMENT.documents(), inline_spans(PLACEMENT))) == least
    how = dataclasses.replace(find_method("prophetkv"), selector=selector, budget=Budget(token_layers=least))
    _, ledger = read(model, how)
    assert ledger.spending == Spending(62, 3, least, rows=0, probe=least, repair=0)
    with pytest.raises(InputError, match=f"the least possible is {least}"):
        read(model, dataclasses.replace(how, budget=Budget(token_layers=least - 1)))


@families
def test_the_same_rows_whether_the_opening_is_exact_or_inline(family: str) -> None:
    model, documents = tiny(family), PLACEMENT.documents()
    selector = find_method("infoflow").selector
    segments = dict(Isolated().compile(model, [PLACEMENT.runs[i].ids for i in (0, *documents)]))
    cache = assemble(model, PLACEMENT, {run: segments[n] for n, run in enumerate((0, *documents))}, PLACEMENT.tokens)
    inline = scene_of(model)
    assert inline.cache is not None
    try:
        exact = Scene(model, PLACEMENT, documents, inline_spans(PLACEMENT)[1:], cache=cache)
        assert torch.equal(selector.choose(exact).ranking, selector.choose(inline).ranking)
    finally:
        model.pool.release(cache)
        model.pool.release(inline.cache)


def test_a_prompt_that_ends_with_a_document_and_one_without_any() -> None:
    ends = place_runs(runs_of("iAB", (3, 9, 8)))
    for name in ("prophetkv", "fusionrag", "infoflow", "a3"):
        out, ledger = read(tiny(), dataclasses.replace(find_method(name), budget=None), ends)
        assert close(out, full_prefill(stock(), ends.ids)[-1:])
        alone = place_runs(runs_of("i", (6,)))
        out, ledger = read(tiny(), find_method(name), alone)
        assert close(out, full_prefill(stock(), alone.ids)[-1:])
        assert ledger.spending is not None
        assert ledger.spending.charged == 0


def test_the_published_settings_by_name_and_by_option() -> None:
    assert find_method("prophetkv:layers=0+-1").selector == QuestionAttention(layers=(0, -1))
    written = "prophetkv:layers=-2+-1,softmax_over=documents+question,reduce_rows=l2"
    assert find_method(written).selector == find_method("infoflow").selector
    assert find_method("prophetkv:context_share=0,layers=-1").selector == find_method("fusionrag").selector
    for option, rule in (
        ("context_share=1.5", "between 0 and 1"),
        ("softmax_over=question", "one of documents"),
        ("reduce_rows=median", "mean, max or l2"),
        ("reduce_heads=l2", "mean or max"),
    ):
        with pytest.raises(InputError, match=rule):
            find_method(f"prophetkv:{option}")
    for layers in ((3,), (-4,)):
        with pytest.raises(InputError, match="0 to 2, or -3 to -1"):
            read(tiny(), dataclasses.replace(find_method("a3"), selector=QuestionAttention(layers=layers)))
