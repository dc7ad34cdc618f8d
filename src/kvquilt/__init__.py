"""Compile each document's KV cache once; reuse it in any prompt and any order; say what was reused.

The names below are the public API. They load on first use, so that ``import kvquilt`` stays quick: torch and
transformers come in with the first name that needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvquilt.answer import Answer, Stream
    from kvquilt.engine import Engine
    from kvquilt.errors import KvquiltError
    from kvquilt.ledger import Ledger
    from kvquilt.model.load import load_model
    from kvquilt.prompt import Document, Inline, Prompt
    from kvquilt.store import Store
    from kvquilt.tuning_samples import Question

    __version__: str

__all__ = [
    "Answer",
    "Document",
    "Engine",
    "Inline",
    "KvquiltError",
    "Ledger",
    "Prompt",
    "Question",
    "Store",
    "Stream",
    "__version__",
    "load_model",
]

_HOMES = {
    "Answer": "kvquilt.answer",
    "Document": "kvquilt.prompt",
    "Engine": "kvquilt.engine",
    "Inline": "kvquilt.prompt",
    "KvquiltError": "kvquilt.errors",
    "Ledger": "kvquilt.ledger",
    "Prompt": "kvquilt.prompt",
    "Question": "kvquilt.tuning_samples",
    "Store": "kvquilt.store",
    "Stream": "kvquilt.answer",
    "load_model": "kvquilt.model.load",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("kvquilt")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'kvquilt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
