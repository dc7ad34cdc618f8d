"""Operations against closed forms and against what hooks counted."""

from __future__ import annotations

import pytest

from kvquilt.accounting import full_flops
from kvquilt.evaluation.flops import Shape, head_flops, inline_positions, published_flops, row_flops
from kvquilt.ledger import Ledger
from kvquilt.placement import place_runs
from kvquilt.repair.presets import find_method
from tests.engines import QUESTION, documents, make_engine
from tests.models import tiny


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_all_rows_are_a_full_prefill(family: str) -> None:
    model = tiny(family)
    assert row_flops(model, range(90)) + head_flops(model) == full_flops(model, 90)


def test_full_prefill_in_closed_form() -> None:
    model, n = tiny(), 50
    # 2 w per row and layer; 4 H d_h per query-key pair and layer: 2 H d_h L N (N + 1); width 64, inner 96
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64
    assert row_flops(model, range(n)) == 3 * (2 * per_layer * n + 2 * 4 * 16 * n * (n + 1))


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
        opening = len(placement.runs[0].ids)  # compiled, like a document; the first document behind it is exact
        again = [p for run in (2, 3) for p in list(placement.span(run))[: 5 * bool(recomputed)]]
        assert len(again) == recomputed
        inline = [p for p in inline_positions(placement) if p >= opening]
        assert len(inline) == len(placement.runs[-1].ids)
        expected = row_flops(engine.model, inline) + row_flops(engine.model, again) + head_flops(engine.model)
        assert ledger.flops == pytest.approx(expected)


def test_the_published_count_by_hand() -> None:
    # L 2, d 8, H 4, H_kv 2, d_h 3, I 10; S 5, C 7. Per layer: q 2*8*12*5, k and v 4*8*6*5, o 2*8*12*5,
    # rotation 3*5*3*6, attention 4*5*12*3*4, perceptron 6*5*8*10, norms 10*5*8
    per_layer = 960 + 960 + 960 + 270 + 2880 + 2400 + 400
    assert published_flops(Shape(2, 8, 4, 2, 3, 10), 5, 7) == 2 * per_layer
    assert published_flops(Shape(2, 8, 4, 2, 3, 10, normed=True), 5, 7) == 2 * (per_layer + 4 * 5 * 3 * 6)


def test_shapes_of_models() -> None:
    assert Shape.of(tiny()) == Shape(layers=3, width=64, heads=4, kv_heads=2, head_dim=16, inner=96)
    assert Shape.of(tiny("qwen3")).normed
