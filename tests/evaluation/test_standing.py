"""What a prompt that was read once is asked: the same as asking it anew each time."""

from __future__ import annotations

import pytest
import torch

from kvquilt.engine import Engine
from kvquilt.evaluation.standing import reading
from kvquilt.fidelity import compare, speak
from kvquilt.placement import Placement, place_runs
from kvquilt.repair.presets import METHODS, find_method
from tests.engines import QUESTION, at_rest, documents, make_engine

pytestmark = pytest.mark.usefixtures("nan_slots")


def placed(engine: Engine, method: str = "none", count: int = 3) -> Placement:
    found = find_method(method)
    runs = engine.prompt(QUESTION, documents(count)).runs(engine.model.tokenizer)
    return place_runs(runs, found.order, range(count) if found.needs_ranking else (), found.moved)


@pytest.mark.parametrize("method", ["full", "none", "samkv:50%", "ape", "retrieved-document"])
def test_questions_do_not_disturb_each_other(method: str) -> None:
    """samkv drops slots and ape shares positions: what follows then stands elsewhere than its slot says."""
    with make_engine() as engine:
        placement, chosen, lent = placed(engine, method), find_method(method), engine.model.pool.lent
        with reading(engine, placement, chosen, None, 12) as prompt:
            first = prompt.force([5, 6, 7])
            answer = prompt.answer(12)
            assert torch.equal(prompt.force([5, 6, 7]), first)
            own = prompt.force(answer)
            assert prompt.answer(4) == answer[:4]
        assert own.argmax(-1).tolist() == list(answer), "its own answer is what it finds most likely"
        assert answer == speak(engine, placement, chosen, None, 12).ids
        at_rest(engine, lent=lent)


def test_forced_rows_are_those_of_the_gate() -> None:
    with make_engine() as engine:
        placement = placed(engine)
        true = speak(engine, placement, METHODS["full"], None, 6)
        close = compare(engine, placement, METHODS["none"], None, true)
        with reading(engine, placement, METHODS["none"], None, 6) as prompt:
            assert torch.equal(prompt.force(true.ids), close.spoken.steps)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_full_prefill_in_two_parts_is_full_prefill_up_to_rounding(count: int) -> None:
    with make_engine() as engine:
        placement, full = placed(engine, "full", count), METHODS["full"]
        with reading(engine, placement, full, None, 8) as prompt:
            whole, ledger = prompt.force([5, 6, 7]), prompt.ledger
        with reading(engine, placement, full, None, 8, in_parts=True) as prompt:
            assert torch.allclose(prompt.force([5, 6, 7]), whole, atol=1e-4)
            assert prompt.ledger.tokens == ledger.tokens
            assert prompt.ledger.forward_tokens == ledger.forward_tokens
        assert ledger.seconds["first_token"] >= ledger.seconds["read"]


def test_decoded_tokens_are_counted() -> None:
    with make_engine() as engine:
        with reading(engine, placed(engine), METHODS["none"], None, 8) as prompt:
            answer = prompt.answer(8)
        assert prompt.ledger.forward_tokens["decode"] == len(answer) - 1
        assert prompt.ledger.seconds["decode"] > 0
