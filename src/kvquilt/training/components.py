"""The parameters of a writer under training: which there are, and which of them are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvquilt.errors import InputError
from kvquilt.identity import digest_fields
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts
from kvquilt.training.trainable import Trainable


class Components:
    """Parameters in fp32, on the model's device.

    Attributes:
        named: by name, in a fixed order; see the shape's ``drawn``.
    """

    def __init__(self, shape: Trainable, named: Mapping[str, torch.Tensor], trained: Sequence[str] = ()) -> None:
        """`trained`: of the shape's kinds; all if empty."""
        self.shape = shape
        kinds = set(trained) or set(shape.kinds)
        self.named = {
            name: torch.nn.Parameter(tensor, requires_grad=shape.kind_of(name) in kinds)
            for name, tensor in named.items()
        }

    @classmethod
    def fresh(cls, model: LanguageModel, shape: Trainable, seed: int, trained: Sequence[str] = ()) -> Components:
        """As the shape draws them.

        Raises:
            InputError, UnsupportedModelError: the model has no place for them.
        """
        return cls(shape, shape.drawn(model, seed), trained)

    @classmethod
    def begun(
        cls,
        model: LanguageModel,
        shape: Trainable,
        seed: int,
        there: Mapping[str, torch.Tensor],
        trained: Sequence[str],
    ) -> Components:
        """`fresh`, with copies of the tensors that are `there` already.

        Raises:
            InputError: one of them is of no part of this shape, or of another size.
        """
        made = cls.fresh(model, shape, seed, trained)
        for name, tensor in there.items():
            if name not in made.named:
                raise InputError("from", "the artefact has a part that the new writer has not", name)
            if tensor.shape != made.named[name].shape:
                rule = f"sizes, such as rank, and model must be the artefact's: {name} is {tuple(tensor.shape)} there"
                raise InputError("from", rule, f"{tuple(made.named[name].shape)}")
            with torch.no_grad():
                made.named[name].copy_(tensor)
        return made

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.named.items() if p.requires_grad}

    @property
    def digest(self) -> str:
        """Of every value."""
        fields = [(f"{n} {tuple(p.shape)}", p.detach().cpu().numpy().tobytes()) for n, p in self.named.items()]
        return digest_fields("kvquilt 2026-11 components v1", fields)

    def parts(self) -> Parts:
        """For a forward; shares the parameters."""
        return self.shape.parts(self.named)
