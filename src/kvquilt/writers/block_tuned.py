"""A fine-tuned reader as a folder (Block-Attention, arXiv 2409.15355): another model, whose writer is isolated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from kvquilt.errors import InputError, WriterError
from kvquilt.identity import Fingerprint
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Parts, parts_of
from kvquilt.model.tuned import merged
from kvquilt.model.weights import Weights
from kvquilt.writers.folder import ADAPTER, CONFIG, WEIGHTS, load_folder, save_folder
from kvquilt.writers.manifest import NOTHING, base_of, check_base, check_content, manifest, understood
from kvquilt.writers.peft_layout import check_config, config_text, from_peft, to_peft
from kvquilt.writers.tensors import check_named, content_digest, copied, read_tensors

BLOCK_TUNED = "block-tuned"


@dataclass(frozen=True, slots=True)
class Tuning:
    """What training made of a reader: an adapter to be merged into its weights, or whole weights.

    Attributes:
        base: fingerprint of the one model it was trained for.
        named: ``<layer>.lora_A`` and ``.lora_B`` of every adapted layer, or ``<name>`` of every trained weight below
            the base model; fp32.
        alpha: of the adapter; over its rank it is the scaling.
        content: identity, over all of the above.
        base_name: what a person calls the model.
    """

    base: Fingerprint
    named: Mapping[str, torch.Tensor] = field(repr=False, compare=False)
    alpha: float
    content: str
    base_name: str = field(default="", compare=False)

    @classmethod
    def of(cls, base: Fingerprint, named: Mapping[str, torch.Tensor], alpha: float, base_name: str = "") -> Tuning:
        """A copy of trained tensors.

        Raises:
            InputError: tensors that do not go together.
        """
        if not math.isfinite(alpha):
            raise InputError("alpha", "must be a finite number", alpha)
        if any("lora_" in name for name in named):
            check_named(named)
        elif not named or not all(bool(torch.isfinite(t).all()) for t in named.values()):
            raise InputError("weights", "at least one, all of them finite")
        kept = copied(named)
        return cls(base, kept, float(alpha), content_digest(BLOCK_TUNED, base, kept, alpha, ()), base_name)

    @property
    def parts(self) -> Parts:
        """What a forward of the base model needs to be one of the tuned."""
        return tuned_parts(self.named, self.alpha)

    def merged(self, model: LanguageModel) -> LanguageModel:
        """The tuned model, beside `model`.

        Raises:
            WriterMismatchError: `model` is not the one it was trained for.
        """
        check_base("this reader", self.base, self.base_name, model)
        return merged(model, self.parts, self.content)

    def save(self, path: Path, recipe: Mapping[str, Any] = NOTHING, metrics: Mapping[str, Any] = NOTHING) -> str:
        """Write the folder that `tuned` reads, an adapter in PEFT's own layout; returns `content`."""
        about = manifest(BLOCK_TUNED, self.content, self.base, self.base_name, recipe, metrics) | {"alpha": self.alpha}
        tensors = {name: tensor.cpu() for name, tensor in self.named.items()}
        if adapter := to_peft(tensors):
            config = config_text(tensors, self.alpha, self.base_name).encode()
            save_folder(path, about, {CONFIG: config, ADAPTER: save(adapter, {"format": "pt"})})
        else:
            save_folder(path, about, {WEIGHTS: save(tensors, {"format": "pt"})})
        return self.content

    @classmethod
    def load(cls, path: Path) -> Tuning:
        """From a folder, verified to the last byte.

        Raises:
            WriterError: the folder is missing, incomplete, damaged or of something else.
        """
        about, files = load_folder(path)
        with understood(path):
            if about["kind"] != BLOCK_TUNED:
                raise WriterError(f"holds a {about['kind']} writer, not a tuned reader")
            alpha, whole = float(about["alpha"]), WEIGHTS in files
            named = read_tensors(files, WEIGHTS) if whole else from_peft(read_tensors(files, ADAPTER))
            made = cls.of(base_of(about), named, alpha, str(about["base"]["name"]))
            if not whole:
                check_config(files[CONFIG], named, alpha)
            check_content(made.content, about)
        return made


def tuned(model: LanguageModel, path: Path) -> LanguageModel:
    """The model that a folder of kind ``block-tuned`` makes of `model`, which stays as it is.

    Raises:
        WriterError, WriterMismatchError: see `Tuning`.
    """
    return Tuning.load(path).merged(model)


def tuned_parts(named: Mapping[str, torch.Tensor], alpha: float) -> Parts:
    """`Parts` that share a tuning's tensors."""
    return parts_of(named, alpha) if any("lora_" in name for name in named) else Parts(weights=Weights(named))
