"""What to install where an adapter's framework is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of what this extra installs.

    Raises:
        ModuleNotFoundError: one of them is missing; says how to get it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        told = f"{error.name} is missing: pip install 'kvquilt[{extra}]'"
        raise ModuleNotFoundError(told, name=error.name, path=error.path) from error
