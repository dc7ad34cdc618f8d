"""What ``writer.json`` says of anything that was trained: what it is, and for which model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kvquilt.errors import InputError, WriterError, WriterMismatchError
from kvquilt.identity import Fingerprint
from kvquilt.model.language_model import LanguageModel
from kvquilt.writers.folder import MANIFEST

NOTHING: Mapping[str, Any] = {}


def manifest(
    kind: str, content: str, base: Fingerprint, base_name: str, recipe: Mapping[str, Any], metrics: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields that all kinds have."""
    return {
        "kind": kind,
        "digest": content,
        "base": {"name": base_name, "fingerprint": base.digest, **asdict(base)},
        "stored": "float32",
        "recipe": dict(recipe),
        "metrics": dict(metrics),
    }


def base_of(about: Mapping[str, Any]) -> Fingerprint:
    """Fingerprint of the model it was trained for.

    Raises:
        KeyError, TypeError: the manifest lacks it.
    """
    return Fingerprint(**{f.name: str(about["base"][f.name]) for f in fields(Fingerprint)})


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Whatever is wrong with the content of a verified folder is a `WriterError` that names the folder."""
    try:
        yield
    except (InputError, WriterError) as error:
        raise WriterError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise WriterError(f"{path}: {MANIFEST} lacks something, or has it in another form ({error!r})") from error


def check_content(content: str, about: Mapping[str, Any]) -> None:
    """Raise `WriterError` unless what was loaded has the identity that was saved."""
    if content != about["digest"]:
        raise WriterError(f"its content is not what {MANIFEST} says was saved (another digest)")


def check_base(what: str, base: Fingerprint, base_name: str, model: LanguageModel) -> None:
    """Raise `WriterMismatchError`, saying what differs, unless `model` is the one that `what` was trained for."""
    names = [f.name for f in fields(Fingerprint)]
    if differing := [n for n in names if getattr(base, n) != getattr(model.fingerprint, n)]:
        hint = "; `kvquilt writers rebind` takes it to another dtype of its model" if "dtype" in differing else ""
        raise WriterMismatchError(
            f"{what} was trained for {base_name or 'another model'} in {base.dtype}, not for {model.name} in "
            f"{model.fingerprint.dtype}; what differs: {', '.join(differing)}{hint}"
        )
