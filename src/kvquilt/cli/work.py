"""What the verbs that need a model share; everything heavy is imported when called."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquilt.cli.common import warn
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.config import Settings
    from kvquilt.engine import Engine
    from kvquilt.passages import Passages


def quiet_libraries() -> None:
    """No progress bars of other libraries off a terminal, and their log only from errors on."""
    from transformers.utils import logging as notices

    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        notices.disable_progress_bar()


def check_path(path: Path) -> None:
    """Raise `InputError` if there is no such folder or file, before a model is loaded for nothing."""
    if not path.exists():
        raise InputError("DIR", "no such folder or file", str(path))


def check_helper(methods: Iterable[str], settings: Settings) -> None:
    """Raise `InputError` if one of these methods asks a helper model and there is none, before a model is loaded."""
    from kvquilt.repair.helper_model import no_helper
    from kvquilt.repair.presets import find_method
    from kvquilt.repair.selector import Probe

    named = (find_method(name) for name in methods if name != "auto")
    if settings.helper_model is None and any(method.selector.probe is Probe.HELPER for method in named):
        raise no_helper()


def check_writers(methods: Iterable[str], given: Sequence[str]) -> None:
    """Raise `InputError` if one of these methods asks for a trained writer that cannot be among those given, or a
    name or folder of them cannot be right, before a model is loaded."""
    from kvquilt.repair.presets import find_method
    from kvquilt.writers.loaded import split_name
    from kvquilt.writers.recipes import KINDS, check_free, check_recipe

    pairs = [split_name(each) for each in given]
    names = [name for name, _ in pairs if name]
    for name, path in pairs:
        if name:
            check_free(name)
        if not Path(str(path)).expanduser().is_dir():
            raise InputError("writer", "no such folder", str(path))
    for asked in methods:
        if asked == "auto" or not (recipe := find_method(asked).writer):
            continue
        check_recipe(recipe, names)
        if recipe in KINDS and len(names) == len(pairs) and recipe not in names:
            raise InputError("writer", f"{asked} needs a trained writer of that kind: give its folder, --writer PATH")


@contextmanager
def open_engine(settings: Settings, writers: Sequence[str] = (), system: str | None = None) -> Iterator[Engine]:
    """The engine of these settings with trained writers, and a system message of its own; closed at the end."""
    quiet_libraries()
    from kvquilt.engine import SYSTEM, Engine

    with Engine.load(settings=settings, writer=writers, system=SYSTEM if system is None else system) as engine:
        yield engine


def passages_in(path: Path, settings: Settings, tokenizer: Any) -> Passages:
    """The passages below `path`, measured in the model's tokens; skipped files are named on stderr.

    Raises:
        InputError: no such path, or nothing readable in it.
    """
    from kvquilt.passages import FORMATS, read_passages
    from kvquilt.tokens import encoder

    encode = encoder(tokenizer).encode
    found = read_passages(path, limit=settings.passage_tokens, length=lambda text: len(encode(text)))
    for each in found.skipped:
        warn(f"skipped {each.path}: {each.reason}")
    if not found.documents:
        raise InputError("DIR", f"no readable text in files of {' '.join(FORMATS)}", str(path))
    return found
