"""What the answering rows look at, against stock models; for every method there is."""

from __future__ import annotations

import pytest
import torch

from kvquilt.document import Document
from kvquilt.engine import Engine
from kvquilt.evaluation.studies.attention_look import Look, answer_ids, looking
from kvquilt.evaluation.tasks.item import Item
from kvquilt.placement import Placement, place_runs
from kvquilt.repair.presets import METHODS, find_method
from tests.engines import AFFORDABLE, QUESTION, at_rest, documents, make_engine
from tests.models import build
from tests.oracle import random_document, runs_of
from tests.repair.attending import weights

pytestmark = pytest.mark.usefixtures("nan_slots")
ANSWER = (5, 9, 7)


def close(measured: torch.Tensor, truth: torch.Tensor) -> bool:
    return measured.shape == truth.shape and bool(torch.allclose(measured.double(), truth.double(), atol=2e-5))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_full_prefill_looks_as_the_stock_model_does(family: str) -> None:
    """Eager attention of a model that was never touched; gemma3 has windows shorter than the prompt."""
    placement = place_runs(runs_of("iABi", (4, 30, 21, 6)))
    held = [placement.runs[i].document for i in placement.documents()]
    hf = build(family)
    hf.set_attn_implementation("eager")
    ids = torch.tensor([[*placement.ids, *ANSWER[:-1]]])
    with torch.inference_mode():
        maps = hf(input_ids=ids, output_attentions=True, use_cache=False).attentions
    with make_engine(family) as engine, looking(engine, placement, METHODS["full"], None, held, ANSWER) as look:
        assert look.rows.tolist() == [60, 61, 62]
        for layer, truth in enumerate(maps):
            assert close(look.weights(layer), truth[0, :, -3:]), layer
        assert [spot.tokens.tolist() for spot in look.spots] == [list(range(4, 34)), list(range(34, 55))]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_pure_reuse_looks_as_the_stock_model_does_over_moved_documents(family: str) -> None:
    placement = place_runs(runs_of("iABi", (4, 30, 21, 6)))
    held = [placement.runs[i].document for i in placement.documents()]
    truth = weights(family, placement, range(placement.tokens))[:, :, -1]
    with make_engine(family, shared_prefix=False) as engine:
        with looking(engine, placement, METHODS["none"], None, held, ANSWER[:1]) as look:
            for layer in range(look.layers):
                assert close(look.weights(layer)[:, 0], truth[layer]), layer
        with looking(engine, placement, METHODS["full"], None, held, ANSWER[:1]) as full:
            assert not close(full.weights(2)[:, 0], truth[2]), "nothing differs, so nothing was tested"


def placed(engine: Engine, method: str) -> tuple[Placement, list[Document]]:
    held, found = documents(3), find_method(AFFORDABLE[method])
    runs = engine.prompt(QUESTION, held).runs(engine.model.tokenizer)
    return place_runs(runs, found.order, (1, 0, 2) if found.needs_ranking else (), found.moved), held


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_looked_at(method: str) -> None:
    """Weights sum to 1, and a document's tokens are found wherever they stand."""
    with make_engine(trained=True) as engine:
        placement, held = placed(engine, method)
        lent = engine.model.pool.lent
        with looking(engine, placement, find_method(AFFORDABLE[method]), None, held, ANSWER) as look:
            for layer in range(look.layers):
                made = look.weights(layer)
                assert close(made.sum(-1), torch.ones(4, len(ANSWER)))
                assert bool(torch.isfinite(look.values(layer)[:, look.spots[0].around]).all())
            check_spots(look, placement, method)
        at_rest(engine, lent=lent)


def check_spots(look: Look, placement: Placement, method: str) -> None:
    tokens = [spot.tokens for spot in look.spots]
    lengths = {placement.runs[i].document.id: len(placement.runs[i].ids) for i in placement.documents()}
    assert [len(each) for each in tokens] == [lengths[d.id] for d in documents(3)]
    there = torch.cat(tokens)
    if method == "encoder":
        assert bool((there == -1).all())
        return
    there = there[there >= 0]
    assert len(there.unique()) == len(there)
    soft = {"kv-packet", "joint"}
    assert (sum(len(spot.around) for spot in look.spots) > len(there)) == (method in soft)
    first = [int(each[each >= 0][0]) for each in tokens]
    if method == "retrieved-document":
        assert first[0] < first[2] < first[1], "the best of the ranking stands last"
    elif method != "infoflow-reorder":
        assert first == sorted(first)


def test_dropped_tokens_have_no_slot_and_kept_ones_hold_their_own_keys() -> None:
    with make_engine() as engine:
        placement, held = placed(engine, "samkv")
        with looking(engine, placement, find_method("samkv:50%"), None, held, ANSWER) as look:
            kept = torch.cat([spot.tokens for spot in look.spots])
            assert 0 < int((kept >= 0).sum()) < len(kept)
            own = {i: s.clone() for i, s in enumerate(spot.tokens for spot in look.spots)}
            mine = look.cache.slot_values[0, 0].clone()
        with looking(engine, placement, METHODS["full"], None, held, ANSWER) as full:
            # values of the first layer do not depend on what a token has seen
            for i, spot in enumerate(full.spots):
                there = own[i] >= 0
                truth = full.cache.slot_values[0, 0][:, spot.tokens[there]]
                assert torch.allclose(mine[:, own[i][there]], truth, atol=1e-5)


def test_the_answer_is_told_without_its_end() -> None:
    _, document = random_document(5, 1, "d")
    item = Item("i", (document,), QUESTION, ("an answer",), (0,), "g", "t")
    with make_engine() as engine:
        ids = answer_ids(engine, item)
        assert engine.model.tokenizer.decode(ids) == "an answer"
