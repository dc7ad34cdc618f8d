"""Dense retrieval: texts as vectors, compared by their cosine. Nothing here is asked unless it is named.

``wordllama``: static token vectors inside that package (extra ``dense``), read from its files without importing it;
any other name is a folder or Hugging Face id of an encoder, see `TextEncoder`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvquilt.errors import InputError

PACKAGE = "wordllama"
_VECTORS, _TOKENIZER = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"

Vectors = NDArray[np.float32]


class Encoder(Protocol):
    """Makes vectors of texts."""

    @property
    def name(self) -> str: ...

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """``[texts, width]`` of length 1 each."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class StaticEncoder:
    """The mean of a text's token vectors, whatever stands beside a token.

    Attributes:
        table: ``[vocabulary, width]`` fp32.
        tokenizer: of the package tokenizers.
    """

    name: str
    table: Vectors = field(repr=False)
    tokenizer: Any = field(repr=False)

    @classmethod
    def load(cls, folder: Path | None = None) -> StaticEncoder:
        """From the package's folder, by default where it is installed.

        Raises:
            InputError: it is not installed, or holds no such files.
        """
        if folder is None:
            spec = importlib.util.find_spec(PACKAGE)
            if spec is None or not spec.submodule_search_locations:
                raise InputError("dense", f"{PACKAGE} is not installed: pip install 'kvquilt[dense]'", PACKAGE)
            folder = Path(spec.submodule_search_locations[0])
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        for name in (_VECTORS, _TOKENIZER):
            if not (folder / name).is_file():
                raise InputError("dense", f"this version of {PACKAGE} has no file {name}", PACKAGE)
        tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        table = load_file(folder / _VECTORS)["embedding.weight"].astype(np.float32)
        return cls(PACKAGE, table, tokenizer)

    def vectors(self, texts: Sequence[str]) -> Vectors:
        rows = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        means = [self.table[ids].mean(0) if ids else np.zeros(self.table.shape[1], np.float32) for ids in rows]
        return unit(np.stack(means))


def find_encoder(name: str) -> Encoder:
    """The encoder of that name.

    Raises:
        InputError: the package is not installed; no folder and no model of that name, or no encoder of texts.
    """
    if name == PACKAGE:
        return StaticEncoder.load()
    from kvquilt.model.text_encoder import TextEncoder

    return TextEncoder.load(name)


def similarities(encoder: Encoder, question: str, texts: Sequence[str]) -> list[float]:
    """The cosine of the question's vector and each text's; larger is nearer."""
    asked, *others = encoder.vectors([question, *texts])
    return [float(asked @ other) for other in others]


def unit(rows: Vectors) -> Vectors:
    """Rows of length 1; a row of zeros stays."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1), dtype=np.float32)
