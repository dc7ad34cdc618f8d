"""What a task's file holds: JSON, JSON lines, or a data set of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvquilt.document import check_text
from kvquilt.errors import InputError

_HUB = "hf:"


def read_rows(path: str | Path, form: str, sha256: str = "") -> Any:
    """The JSON value of a file; of lines or of a data set, the list of its rows.

    Args:
        path: a file (``.jsonl`` and ``.ndjson`` are lines), or ``hf:OWNER/NAME``, ``hf:OWNER/NAME:SPLIT`` or
            ``hf:OWNER/NAME:CONFIG/SPLIT``, a folder in place of the name too.
        form: what is said of a file that is no JSON.
        sha256: what the file's digest must be.

    Raises:
        InputError: it cannot be read, has another digest or another form; a data set without the package for it.
    """
    if str(path).startswith(_HUB):
        if sha256:
            raise InputError("sha256", "is of a file, and a data set is none", str(path))
        return _hub_rows(str(path).removeprefix(_HUB))
    try:
        raw = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # the latter of a name that none can have
        said = getattr(error, "strerror", None) or str(error)
        raise InputError("path", f"must be a file that can be read: {said}", str(path)) from error
    found = hashlib.sha256(raw).hexdigest()
    if sha256 and found != sha256:
        raise InputError("path", f"must have the SHA-256 digest {sha256}", found)
    if Path(path).suffix.lower() in (".jsonl", ".ndjson"):
        lines = enumerate(raw.splitlines(), start=1)
        return [_json(line, f"path: line {n}", form) for n, line in lines if line.strip()]
    return _json(raw, "path", form)


def _json(raw: bytes, where: str, form: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(where, form, "no JSON") from error


def _hub_rows(written: str) -> list[Any]:
    try:
        from datasets import load_dataset
    except ImportError:
        rule = "a data set of the hub needs the package datasets: pip install 'kvquilt[datasets]', or name a file"
        raise InputError("path", rule, written) from None
    name, _, part = written.partition(":")
    config, _, split = part.rpartition("/")
    try:
        loaded = load_dataset(name, config or None, split=split or None)
    except (OSError, ValueError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError("path", f"must be a data set that can be loaded: {said}", written) from error
    if isinstance(loaded, dict):  # by split, where none was named
        if len(loaded) > 1:
            raise InputError("path", f"must name a split, {name}:SPLIT; it has {', '.join(loaded)}", written)
        loaded = next(iter(loaded.values()))
    return list(loaded)


def check_rows(rows: Any, form: str) -> list[Any]:
    """Raises `InputError`: no list, or an empty one."""
    if not isinstance(rows, list) or not rows:
        raise InputError("path", form, type(rows).__name__)
    return rows


@contextmanager
def one_row(where: str, form: str) -> Iterator[None]:
    """Inside the block a row is taken apart: what it lacks, or has in another form, is an `InputError`.

    It names the row, and the field as far as that is known; it quotes nothing of what the row says.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error.field}", error.rule, error.got) from error
    except KeyError as error:
        raise InputError(where, form, f"no {error.args[0]}") from error
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise InputError(where, form, type(error).__name__) from error


def text_of(value: object, field: str) -> str:
    """Raises `InputError`: no text, or one that cannot be written (`check_text`)."""
    check_text(field, value)
    return str(value)
