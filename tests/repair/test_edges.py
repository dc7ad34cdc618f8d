"""Prompts at the edge, for every method: no question behind documents, no documents, one twice, nothing to spend."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquilt.errors import InputError
from kvquilt.ledger import Provenance
from kvquilt.model.rows import current_plan
from kvquilt.repair.presets import METHODS
from tests.engines import QUESTION, documents, make_engine
from tests.oracle import close, full_prefill, pure_reuse, runs_of, stock
from tests.repair.methods import SLOTTED, least, ordered, read, reader_of, refused, rows_passing, small, within, wrapped

methods = pytest.mark.parametrize("name", METHODS)
shapes = st.sampled_from(["A", "iA", "AB", "iAiB", "AA", "iABA", "i", "ii", "BiA", "ABi"])


@pytest.mark.parametrize("name", SLOTTED)
@settings(max_examples=8, deadline=None)
@given(shapes, st.sampled_from([1, 5, 40]), st.sampled_from([0, 30, 80, 10**6]))
def test_prompts_that_end_with_a_document_or_have_none(name: str, shape: str, logits: int, budget: int) -> None:
    """The last rows are run whatever they hold; budgets hold and the account adds up all the same."""
    reader, method = reader_of(), METHODS[name]
    placement = ordered(runs_of(shape, [13 + n for n in range(len(shape))]), method)
    logits = min(logits, placement.tokens)
    placed = wrapped(reader, placement, method)
    inline = {s for i, run in enumerate(placed.runs) if run.document is None for s in placed.span(i)}
    inline |= {*range(placed.tokens - logits, placed.tokens)}
    chosen = within(method, token_layers=budget) if method.reuses else method
    try:
        read(reader, placement, chosen, logits)
    except InputError as error:
        enough = int(re.findall(r"the least possible is (\d+)", str(error))[0])
        assert budget < enough
        chosen = within(method, token_layers=enough)
        read(reader, placement, chosen, logits)
    with rows_passing(reader.model) as ours:
        out, ledger = read(reader, placement, chosen, logits)
    assert out.shape[0] == logits
    assert bool(torch.isfinite(out).all())
    assert sum(ledger.tokens.values()) == placement.tokens
    if chosen.budget is not None and ledger.spending is not None:
        assert 0 <= ours.charge - 3 * len(inline) <= ledger.spending.charged <= chosen.budget.allows(0, 0)
    if not placement.documents() or not method.reuses:
        assert close(out, full_prefill(stock(), placement.ids)[-logits:])


@methods
def test_without_a_token_layer_a_method_that_needs_no_probe_is_pure_reuse(name: str) -> None:
    reader, method = reader_of(), METHODS[name]
    placement = ordered(runs_of("iABi", (4, 20, 15, 3)), method)
    if not method.reuses or refused(reader, placement, within(method, token_layers=0)) is not None:
        assert least(reader, placement, method) > 0 or name == "full"
        return
    out, ledger = read(reader, placement, within(method, token_layers=0))
    assert ledger.spending is not None
    assert (ledger.spending.charged, ledger.tokens[Provenance.RECOMPUTED]) == (0, 0)
    if not method.writer and method.correction is None:
        assert close(out, pure_reuse(stock(), placement)[-1:])


def test_methods_side_by_side_in_threads_answer_as_one_after_the_other() -> None:
    """Plans and hooks of one request never reach another that waits for the model."""
    names = [f"{n}:70%" if METHODS[n].budget is not None else n for n in METHODS]
    with make_engine(helper=small(), conversations=0, trained=True) as engine:
        docs = documents(3, 60)
        for _ in range(2):
            alone = {n: engine.ask(QUESTION, docs, method=n, max_new_tokens=3).token_ids for n in names}
        together: dict[str, tuple[int, ...]] = {}

        def ask(mine: list[str]) -> None:
            for name in mine:
                together[name] = engine.ask(QUESTION, docs, method=name, max_new_tokens=3).token_ids

        threads = [threading.Thread(target=ask, args=(names[n::3],)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == alone
        assert current_plan() is None
