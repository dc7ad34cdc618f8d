"""What the cache of a model takes, and what computing a prompt anew would cost, from the numbers of its configuration.

No model is loaded, and none need be here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquilt.errors import InputError, nearest

_NUMBER_BYTES = 2  # of bf16, which caches are kept in


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A decoder of attention and a gated perceptron of three matrices."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, two bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _NUMBER_BYTES

    def flops(self, first: int, last: int) -> float:
        """Operations of the rows ``first .. last - 1`` of a prompt: weights, and attention to all that each sees."""
        projections = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        weights = self.layers * (projections + 3 * self.width * self.inner)
        pairs = (last * (last + 1) - first * (first + 1)) / 2
        return 2.0 * weights * (last - first) + 4.0 * self.layers * self.heads * self.head_dim * pairs


SIZES = {
    size.name: size
    for size in (
        ModelSize("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336),
        ModelSize("mistral-7b", 32, 4096, 32, 8, 128, 14336),
        ModelSize("qwen3-8b", 36, 4096, 32, 8, 128, 12288),
        ModelSize("qwen3-4b", 36, 2560, 32, 8, 128, 9728),
        ModelSize("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864),
        ModelSize("smollm2-135m", 30, 576, 9, 3, 64, 1536),
    )
}


def find_size(written: str) -> ModelSize:
    """A name of `SIZES`, or a folder (or its ``config.json``) of a model.

    Raises:
        InputError: neither; a configuration that cannot be read, or lacks a number.
    """
    if (known := SIZES.get(written.lower())) is not None:
        return known
    path = Path(written).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise InputError("of", f"must be a known model or a folder with config.json{nearest(written, SIZES)}", written)
    try:
        config: Any = json.loads(path.read_bytes())
        config = config.get("text_config", config)
        heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelSize(
            path.resolve().parent.name,
            int(config["num_hidden_layers"]),
            width,
            heads,
            int(config.get("num_key_value_heads") or heads),
            int(config.get("head_dim") or width // heads),
            int(config["intermediate_size"]),
        )
    except KeyError as error:
        raise InputError("of", f"its configuration has no {error.args[0]}", path.name) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError("of", "must be a configuration as transformers writes it", path.name) from error
