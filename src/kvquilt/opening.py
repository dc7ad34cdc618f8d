"""What an engine is made of, from names: the models, the trained writers, the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvquilt.config import Settings
from kvquilt.errors import InputError
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import load_model
from kvquilt.store import Store
from kvquilt.writers.artefact import read_manifest
from kvquilt.writers.block_tuned import BLOCK_TUNED, tuned
from kvquilt.writers.loaded import Given, Usable, load_all, paired


@dataclass(frozen=True, eq=False, slots=True)
class Opened:
    """Open parts of an engine; whoever has them closes the store."""

    model: LanguageModel
    helper: LanguageModel | None
    writers: Mapping[str, Usable]
    store: Store


def open_parts(
    settings: Settings,
    model: str | None = None,
    helper: str | None = None,
    writer: Given | Sequence[Given] | Mapping[str, Given] = (),
    dtype: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    store_dir: str | Path | None = None,
) -> Opened:
    """Load the models and writers and open the store; what is None is as the settings say. See `Engine.load`.

    A folder of a tuned reader among the writers replaces the model, and the writers are its.
    """
    name, asked = settings.model if model is None else model, settings.helper_model if helper is None else helper
    place = settings.dtype if dtype is None else dtype, settings.device if device is None else device
    loaded = load_model(name, *place, settings.threads if threads is None else threads, settings)
    pairs, second = paired(writer), None
    readers = [each for _, each in pairs if _is_reader(each)]
    if readers:
        loaded = _tuned(loaded, readers)
    writers = load_all([pair for pair in pairs if pair[1] not in readers], loaded)
    if asked is not None:
        second = loaded if asked == name else load_model(asked, *place, settings=settings)
    folder = settings.store_dir if store_dir is None else store_dir
    store = Store.open(folder, settings.memory_bytes, settings.disk_bytes, settings.remote_place)
    return Opened(loaded, second, writers, store)


def _is_reader(given: Given) -> bool:
    if not isinstance(given, str | Path):
        return False
    return read_manifest(Path(given).expanduser()).get("kind") == BLOCK_TUNED


def _tuned(model: LanguageModel, readers: Sequence[Given]) -> LanguageModel:
    if len(readers) > 1:
        raise InputError("writer", "one tuned reader at most: each is another model", ", ".join(map(str, readers)))
    return tuned(model, Path(str(readers[0])).expanduser())
