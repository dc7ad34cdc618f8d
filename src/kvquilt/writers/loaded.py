"""Trained writers that an engine has at hand, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvquilt.errors import InputError
from kvquilt.model.language_model import LanguageModel
from kvquilt.writers.artefact import load_writer
from kvquilt.writers.encoder import Encoder
from kvquilt.writers.link_tokens import LinkTokens
from kvquilt.writers.recipes import KINDS, check_free
from kvquilt.writers.trained import Trained

Usable = Trained | LinkTokens | Encoder
Given = str | Path | Usable
_NAMED = re.compile(r"([A-Za-z][\w.-]*)=(.+)", re.DOTALL)


def paired(given: Given | Sequence[Given] | Mapping[str, Given]) -> list[tuple[str, Given]]:
    """Names and what they stand for, in their order; "" where there is no name.

    Args:
        given: folders, ``NAME=PATH``, or writers as such; one, several, or by name.
    """
    if isinstance(given, Mapping):
        return list(given.items())
    return [split_name(each) for each in ([given] if isinstance(given, Given) else given)]


def load_all(pairs: Sequence[tuple[str, Given]], model: LanguageModel) -> dict[str, Usable]:
    """The writers by name, in their order; without a name one goes by its kind.

    Raises:
        InputError: a name that is none, or is taken.
        WriterError: a folder that is damaged or none.
        WriterMismatchError: a writer of another model.
    """
    out: dict[str, Usable] = {}
    for name, each in pairs:
        name, writer = load_one(each, model, name)
        if name in out:
            raise InputError("writer", f"two are called {name!r}; name one of them: NAME=PATH")
        out[name] = writer
    return out


def load_one(given: Given, model: LanguageModel, name: str = "") -> tuple[str, Usable]:
    """A writer and its name; see `load_all`."""
    if name:
        check_free(name)
    if isinstance(given, Usable):
        given.check(model)
        writer = given.on(model.device)
    else:
        writer = load_writer(Path(given).expanduser(), model)
    if name in KINDS and name != writer.kind:
        raise InputError("writer", f"a {writer.kind} writer cannot go by the name of another kind", name)
    return name or writer.kind, writer


def split_name(given: Given) -> tuple[str, Given]:
    """Name and folder of ``NAME=PATH``; no name for anything else, such as a folder that is called so."""
    if isinstance(given, str) and (named := _NAMED.fullmatch(given)) and not Path(given).exists():
        return named[1], named[2]
    return "", given


def method_of(name: str, writer: Usable) -> str:
    """What the writer's own method is written like."""
    return writer.kind if name == writer.kind else f"{writer.kind}:writer={name}"


def content_of(writer: Usable) -> str:
    """Digest of all that answers depend on; that of what is stored knows nothing of link tokens."""
    return writer.content if isinstance(writer, LinkTokens) else writer.digest


def soft_rows(writer: Usable) -> int:
    """How many it puts around or behind every document."""
    return int(writer.links.shape[1]) if isinstance(writer, LinkTokens) else sum(len(ids) for ids in writer.around)
