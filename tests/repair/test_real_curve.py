"""On a real model: the more a method may spend, the nearer it comes to full prefill, and with enough it is there."""

from __future__ import annotations

import functools

import pytest
import torch

from kvquilt.ledger import Ledger
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import load_model
from kvquilt.placement import Placement
from kvquilt.prompt import Run
from kvquilt.reading import Reader
from kvquilt.repair.nothing import Nothing
from kvquilt.repair.presets import METHODS, Method, find_method
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.engines import TOPICS, documents, make_engine
from tests.repair.methods import WHOLE, ids_in_order, least, ordered, read, within
from tests.test_real_models import found

SHARES = (0.1, 0.6)
QUESTIONS = ("What does the statement do?", "Which names are bound?")


@functools.cache
def model() -> LanguageModel:
    path, settings = found("smollm2")
    if path.suffix == ".gguf":
        pytest.skip("only a GGUF file is here; unpacking it in a second dtype would take too long")
    return load_model(str(path), dtype="float32", settings=settings)


@functools.cache
def prompts() -> list[list[Run]]:
    """Two questions, each about three documents."""
    made = []
    with make_engine(model()) as engine:
        docs = documents(len(TOPICS), 110)
        for n, question in enumerate(QUESTIONS):
            chosen = [docs[(n + step) % len(docs)] for step in (0, 3, 5)]
            made.append(list(engine.prompt(question, chosen).runs(model().tokenizer)))
    return made


@functools.cache
def reader() -> Reader:
    return Reader(model(), Store.open(None, 1 << 30), Isolated(), (), helper=model())


@functools.cache
def truth(ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of full prefill at the last eight places."""
    out, cache = reader().read(Placement((Run(ids),), (0,)), METHODS["full"], None, Ledger(), 0, 8)
    model().pool.release(cache)
    return out.log_softmax(-1)


def distance(method: Method, share: float | None) -> float:
    """Mean KL to full prefill of the prompt as the method has placed it, over the question's last tokens.

    Args:
        share: of what there is to spend on, beside what the method's choosing costs; None for no limit.
    """
    total, layers = [], model().capability.layers
    for runs in prompts():
        placement, ledger = ordered(runs, method), Ledger()
        whole = layers * sum(len(run.ids) for run in runs if run.document is not None)
        budget = 10**9 if share is None else least(reader(), placement, method) + int(share * whole)
        chosen = within(method, token_layers=budget)
        if method.writer:  # what is encoded where it stands is to have stood elsewhere
            read(reader(), placement.reordered(placement.documents()[::-1]), chosen)
        out, cache = reader().read(placement, chosen, None, ledger, 0, 8)
        model().pool.release(cache)
        full = truth(ids_in_order(placement, ledger))
        total.append(float((full.exp() * (full - out.log_softmax(-1))).sum(-1).mean()))
    return sum(total) / len(total)


def reaching_all() -> dict[str, str]:
    """Options with which a method's ranking holds every row."""
    return {**WHOLE, "droidspeak": f"last={model().capability.layers}", "cache-craft": "alpha=1000"}


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.reuses and not isinstance(m.selector, Nothing)])
def test_more_budget_comes_nearer_to_full_prefill(name: str) -> None:
    method = find_method(f"{name}:{whole[name]}" if (whole := reaching_all()).get(name) else name)
    curve = [distance(method, share) for share in SHARES]
    assert curve[-1] < curve[0], "six times the budget brings it nearer"
    assert distance(method, None) < 1e-4, "with every row it is full prefill"
