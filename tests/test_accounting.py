"""Operations that ledgers hold, against closed forms and against rows counted by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvquilt.accounting import full_flops
from kvquilt.ledger import Ledger
from kvquilt.placement import place_runs
from kvquilt.repair.presets import find_method
from tests.engines import QUESTION, documents, make_engine
from tests.models import tiny

# of the tiny model: 3 layers, width 64, 4 heads and 2 of keys of 16 numbers, inner width 96; two norms a layer
WEIGHTS = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64


def rows(positions: Iterable[int]) -> int:
    """Two operations a weight, and four a number of every head for each key that a row sees; three layers."""
    return sum(3 * (2 * WEIGHTS + 4 * 4 * 16 * (position + 1)) for position in positions)


def test_a_full_prefill_is_its_rows_and_one_row_of_logits() -> None:
    model, n = tiny(), 50
    assert full_flops(model, n) == rows(range(n)) + 2 * model.head_weights
    # the closed form of the sum: 2 H d_h L N (N + 1)
    assert rows(range(n)) == 3 * (2 * WEIGHTS * n + 2 * 4 * 16 * n * (n + 1))


def test_a_window_bounds_what_a_row_sees() -> None:
    model = tiny("gemma3")
    windows, c = model.capability.windows, model.capability
    assert None in windows
    assert any(window is not None and window < 90 for window in windows)
    pairs = sum(min(n, 90 if window is None else window) for window in windows for n in range(1, 91))
    weights = 2 * model.layer_weights * 90 + 2 * model.head_weights
    assert full_flops(model, 90) == weights + 2 * c.heads * (c.key_dim + c.value_dim) * pairs


@pytest.mark.parametrize(("method", "recomputed"), [("none", 0), ("epic:k=5", 10)])
def test_inline_and_recomputed_rows_are_what_the_ledger_has(method: str, recomputed: int) -> None:
    with make_engine() as engine:
        chosen = documents(3)
        engine.compile(chosen, gate=False)
        placement = place_runs(engine.prompt(QUESTION, chosen).runs(engine.model.tokenizer))
        for _ in range(2):  # the first compiles the opening
            ledger = Ledger()
            _, cache = engine.reader.read(placement, find_method(method), None, ledger, 1)
            engine.model.pool.release(cache)
        # the opening is compiled, like a document; the first document behind it is exact
        again = [p for run in (2, 3) for p in list(placement.span(run))[: 5 * bool(recomputed)]]
        assert len(again) == recomputed
        question = placement.span(len(placement.runs) - 1)
        assert ledger.flops == pytest.approx(rows(question) + rows(again) + 2 * engine.model.head_weights)
