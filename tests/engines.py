"""Engines over tiny models, documents whose text is real, and what they must leave behind."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from kvquilt import Document, Engine
from kvquilt.config import Settings
from kvquilt.model.language_model import LanguageModel
from kvquilt.repair.presets import METHODS
from kvquilt.store import Store
from tests.models import tiny
from tests.writers.trained import random_writers

SETTINGS = Settings(
    store_dir=Path("unused"), cache_dir=Path("unused"), method="auto", policy=None, max_new_tokens=8,
    gate_max_kl=0.1, gate_min_top1=0.9, gate_seconds=5.0,
)  # fmt: skip
MEMORY = 1 << 28
TOPICS = ("with", "break", "pass", "global", "del", "assert", "while", "if")
QUESTION = "What does the statement do?"

# every method as any prompt can pay for it: with three layers a probe can cost more than reuse saves
AFFORDABLE = {name: name if method.budget is None else f"{name}:1000000" for name, method in METHODS.items()}
# methods whose chosen rows pass every layer and that run nothing else: rows can be counted at the first layer
PLAIN = {name for name, method in METHODS.items() if method.selector.probe.is_blind and name != "droidspeak"}


def documents(count: int = 4, characters: int = 120) -> list[Document]:
    return [Document(topics[name].strip()[:characters], id=name) for name in TOPICS[:count]]


def make_engine(
    model: LanguageModel | str = "llama",
    directory: Path | None = None,
    memory: int = MEMORY,
    trained: bool = False,
    **options: Any,
) -> Engine:
    """An engine on a tiny model; without `directory` its store lives in memory alone.

    Args:
        trained: with a random writer of every kind, for the methods that need one.
    """
    loaded = tiny(model) if isinstance(model, str) else model
    settings = options.pop("settings", SETTINGS)
    options.setdefault("helper", tiny(seed=1))  # for the methods that ask a second model
    if trained:
        options["writers"] = random_writers(loaded)
    return Engine(loaded, Store.open(directory, memory, None), settings, **options)


def stored_bytes(engine: Engine) -> dict[str, bytes]:
    """Every file of the store's segments by name; for a memory store the bytes of every segment."""
    if engine.store.disk is not None:
        base = engine.store.disk.files.base
        return {str(p.relative_to(base)): p.read_bytes() for p in sorted(base.rglob("*.safetensors"))}
    assert engine.store.memory is not None
    found = {}
    for row in engine.store.ls():
        segment = engine.store.memory._entries[row.key].segment
        found[str(row.key)] = segment.keys.numpy().tobytes() + segment.values.numpy().tobytes()
    return found


def at_rest(engine: Engine, conversations: int = 0, lent: int = 0) -> None:
    """Nothing is held, no hook is left, and only live conversations keep slots; `lent` is what was lent before."""
    engine.store.check_integrity()
    for notes in engine.reader._notebooks.values():
        notes.check_integrity()
    assert all(stats.pinned == 0 for stats in engine.store.stats().values())
    assert engine.model.pool.lent == lent + conversations
    assert sum(live.cache is not None for live in engine._live) == conversations
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in engine.model.hf.modules())
