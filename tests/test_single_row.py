"""Single-row products stand in for linear layers and never stay behind."""

from __future__ import annotations

import pytest
import torch

from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan
from kvquilt.model.single_row import SingleRowProducts
from tests.models import build
from tests.tokenizers import chatml_tokenizer


@pytest.mark.parametrize("bias", [False, True])
def test_a_single_row_comes_out_as_from_the_layer(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(64, 96, bias=bias, dtype=torch.bfloat16)
    row = torch.randn(1, 1, 64, generator=generator).bfloat16()
    with torch.inference_mode():
        plain = layer(row)
        with SingleRowProducts(layer).installed():
            fast = layer(row)
    assert fast.shape == plain.shape
    # both round one fp32 sum to bf16, so they differ by one unit in the last place at most
    assert torch.allclose(fast.float(), plain.float(), rtol=2**-7, atol=1e-3)


def test_several_rows_are_untouched() -> None:
    layer = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    rows = torch.ones(1, 3, 8, dtype=torch.bfloat16)
    with torch.inference_mode(), SingleRowProducts(layer).installed():
        inside = layer(rows)
    with torch.inference_mode():
        assert torch.equal(inside, layer(rows))


def test_nothing_stays_behind_after_an_exception() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

    def fail_inside() -> None:
        with SingleRowProducts(model).installed():
            assert "forward" in model[0].__dict__
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail_inside()
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_one_list_serves_every_token_and_follows_a_replaced_weight() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    products, row = SingleRowProducts(layer), torch.ones(1, 1, 8)
    for weight in (torch.eye(8), torch.zeros(8, 8)):
        layer.weight = torch.nn.Parameter(weight)
        with torch.inference_mode(), products.installed():
            assert torch.equal(layer(row), row @ weight.T)
        assert "forward" not in layer.__dict__


def test_a_model_gathers_its_layers_once_and_decodes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = build("llama").bfloat16()
    model = LanguageModel.wrap(hf, chatml_tokenizer(), "tiny", "weights")
    monkeypatch.setattr(torch.nn.Module, "modules", None)  # nobody may walk them again
    calls: list[int] = []
    mv = torch.mv
    monkeypatch.setattr(torch, "mv", lambda weight, row: calls.append(1) or mv(weight, row))
    with model.pool.lend(4) as cache:
        model.forward(torch.tensor([[5, 6, 7]]), RowPlan(torch.arange(3), 3), cache)
        assert not calls
        model.forward(torch.tensor([[8]]), RowPlan(torch.tensor([3]), 4), cache)
    assert len(calls) == 3 * 7 + 1, "every layer's seven products, and the head"
