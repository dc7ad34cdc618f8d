"""Decoding's matrix products: one bf16 row times a matrix, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear


class SingleRowProducts:
    """Lets the linear layers of a model take a matrix-vector product for a single row, where that is switched on.

    In isolation they beat torch's general product for one row; whole decoded tokens do not yet show it in the results.
    Both sum in fp32 and round once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # once, not per token: walking the modules and making the functions would be paid each time
        self._forwards = [(m, _product(m)) for m in model.modules() if type(m) is torch.nn.Linear]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the layers' `forward` inside the block; for one thread at a time.

        A layer whose `forward` somebody replaced already (accelerate does, to move weights) is left to that.
        """
        free = [(layer, forward) for layer, forward in self._forwards if "forward" not in layer.__dict__]
        try:
            for layer, forward in free:
                layer.__dict__["forward"] = forward
            yield
        finally:
            for layer, _ in free:
                layer.__dict__.pop("forward", None)


def _product(layer: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    parameters: dict[str, Any] = layer._parameters  # the dictionary, not its content: a weight may be replaced later

    def forward(rows: torch.Tensor) -> torch.Tensor:
        weight, bias = parameters["weight"], parameters["bias"]
        if rows.numel() != weight.shape[1]:
            return linear(rows, weight, bias)
        row = rows.reshape(-1)
        out = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
        return out.view(*rows.shape[:-1], -1)

    return forward
