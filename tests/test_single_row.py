"""Single-row products stand in for linear layers and never stay behind."""

from __future__ import annotations

import pytest
import torch

from kvquilt.model.single_row import single_row_products


@pytest.mark.parametrize("bias", [False, True])
def test_a_single_row_comes_out_as_from_the_layer(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(64, 96, bias=bias, dtype=torch.bfloat16)
    row = torch.randn(1, 1, 64, generator=generator).bfloat16()
    with torch.inference_mode():
        plain = layer(row)
        with single_row_products(layer):
            fast = layer(row)
    assert fast.shape == plain.shape
    # both round one fp32 sum to bf16, so they differ by one unit in the last place at most
    assert torch.allclose(fast.float(), plain.float(), rtol=2**-7, atol=1e-3)


def test_several_rows_are_untouched() -> None:
    layer = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    rows = torch.ones(1, 3, 8, dtype=torch.bfloat16)
    with torch.inference_mode(), single_row_products(layer):
        inside = layer(rows)
    with torch.inference_mode():
        assert torch.equal(inside, layer(rows))


def test_nothing_stays_behind_after_an_exception() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

    def fail_inside() -> None:
        with single_row_products(model):
            assert "forward" in model[0].__dict__
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail_inside()
    assert all("forward" not in m.__dict__ for m in model.modules())
