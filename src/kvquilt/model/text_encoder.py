"""Vectors of texts by any encoder that transformers can load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from kvquilt.errors import InputError

_AT_ONCE = 16  # texts


@dataclass(frozen=True, eq=False, slots=True)
class TextEncoder:
    """The mean of the last hidden states of a text's own tokens, padding left out; fp32, on the CPU.

    Attributes:
        hf: the model; a text that is longer than its positions is cut.
    """

    name: str
    hf: Any = field(repr=False)
    tokenizer: Any = field(repr=False)

    @classmethod
    def load(cls, name: str) -> TextEncoder:
        """From a folder or by Hugging Face id.

        Raises:
            InputError: nothing there that can be loaded.
        """
        path = Path(name).expanduser()
        source = str(path) if path.is_dir() else name
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            hf = AutoModel.from_pretrained(source, dtype=torch.float32)
        except (OSError, ValueError, KeyError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError("dense", f"must be wordllama, or an encoder's folder or id: {said}", name) from error
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return cls(path.name if path.is_dir() else name, hf.eval(), tokenizer)

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """``[texts, width]`` of length 1 each."""
        limit = getattr(self.hf.config, "max_position_embeddings", None) or 512
        made = []
        for first in range(0, len(texts), _AT_ONCE):
            part = list(texts[first : first + _AT_ONCE])
            read = self.tokenizer(part, return_tensors="pt", padding=True, truncation=True, max_length=limit)
            ids, mask = read["input_ids"], read["attention_mask"]
            with torch.inference_mode():
                states = self.hf(input_ids=ids, attention_mask=mask).last_hidden_state
            weight = mask[:, :, None].float()
            means = (states * weight).sum(1) / weight.sum(1).clamp(min=1)
            made.append(torch.nn.functional.normalize(means, dim=1))
        return torch.cat(made).numpy()
