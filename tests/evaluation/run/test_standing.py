"""What a prompt that was read once is asked: the same as asking it anew each time."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from kvquilt.engine import Engine
from kvquilt.evaluation.run.standing import answers, force, reading
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
            first = force([prompt], [5, 6, 7])[0]
            answer = answers([prompt], 12)[0]
            assert torch.equal(force([prompt], [5, 6, 7])[0], first)
            own = force([prompt], answer)[0]
            assert answers([prompt], 4)[0] == answer[:4]
        assert own.argmax(-1).tolist() == list(answer), "its own answer is what it finds most likely"
        assert answer == speak(engine, placement, chosen, None, 12).ids
        at_rest(engine, lent=lent)


def test_forced_rows_are_those_of_the_gate() -> None:
    with make_engine() as engine:
        placement = placed(engine)
        true = speak(engine, placement, METHODS["full"], None, 6)
        close = compare(engine, placement, METHODS["none"], None, true)
        with reading(engine, placement, METHODS["none"], None, 6) as prompt:
            assert torch.equal(force([prompt], true.ids)[0], close.spoken.steps)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_full_prefill_in_two_parts_is_full_prefill_up_to_rounding(count: int) -> None:
    with make_engine() as engine:
        placement, full = placed(engine, "full", count), METHODS["full"]
        with reading(engine, placement, full, None, 8) as prompt:
            whole, ledger = force([prompt], [5, 6, 7])[0], prompt.ledger
        with reading(engine, placement, full, None, 8, in_parts=True) as prompt:
            assert torch.allclose(force([prompt], [5, 6, 7])[0], whole, atol=1e-4)
            assert prompt.ledger.tokens == ledger.tokens
            assert prompt.ledger.forward_tokens == ledger.forward_tokens
        assert ledger.seconds["first_token"] >= ledger.seconds["read"]


def test_decoded_tokens_are_counted() -> None:
    with make_engine() as engine:
        with reading(engine, placed(engine), METHODS["none"], None, 8) as prompt:
            answer = answers([prompt], 8)[0]
        assert prompt.ledger.forward_tokens["decode"] == len(answer) - 1
        assert prompt.ledger.seconds["decode"] > 0


def test_prompts_answer_together_as_each_does_alone() -> None:
    """Of all kinds: slots dropped, positions shared, documents in layers of their own."""
    methods = ("full", "none", "samkv:50%", "ape", "retrieved-document", "encoder", "link-tokens")
    with make_engine(trained=True) as engine, ExitStack() as held:
        lent = engine.model.pool.lent
        prompts = [
            held.enter_context(reading(engine, placed(engine, method), find_method(method), None, 12))
            for method in methods
        ]
        alone = [(answers([prompt], 12)[0], force([prompt], [5, 6, 7])[0]) for prompt in prompts]
        assert len({ids for ids, _ in alone}) > 3, "all say the same, so nothing is tested"
        assert answers(prompts, 12) == [ids for ids, _ in alone]
        for mine, (_, other) in zip(force(prompts, [5, 6, 7]), alone, strict=True):
            assert torch.allclose(mine, other, atol=1e-4)
        # twice each, together and alone
        assert all(
            prompt.ledger.forward_tokens["decode"] == 2 * (len(ids) - 1)
            for prompt, (ids, _) in zip(prompts, alone, strict=True)
        )
        held.close()
        at_rest(engine, lent=lent)
