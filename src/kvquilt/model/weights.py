"""Whole weights in place of a model's own, on for one forward and never left on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """A fully trained reader: stands where an `Adapter` does, but replaces weights instead of adding to them.

    Attributes:
        named: by name below the base model (``layers.0.mlp.up_proj.weight``), fp32 masters in the shape of the model's
            own; they are used in its dtype.
    """

    named: Mapping[str, torch.Tensor]

    @contextmanager
    def on(self, base: torch.nn.Module, within: str = "") -> Iterator[None]:
        """Use them inside the block; the model's own are put back as the very objects they were.

        Args:
            within: only those whose name begins so.
        """
        kept: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for name, master in self.named.items():
                if name.startswith(within):
                    module, _, leaf = name.rpartition(".")
                    # the dictionary itself: a cast master is part of a graph, which no Parameter can be
                    parameters: dict[str, Any] = base.get_submodule(module)._parameters
                    own = parameters[leaf]
                    kept.append((parameters, leaf, own))
                    parameters[leaf] = master.to(own.dtype)
            yield
        finally:
            for parameters, leaf, own in reversed(kept):
                parameters[leaf] = own
