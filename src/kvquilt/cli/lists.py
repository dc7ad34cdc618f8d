"""Options that are lists: ``A,B``."""

from __future__ import annotations

from typing import Any

from kvquilt.errors import InputError


def names_in(option: str, written: str) -> tuple[str, ...]:
    """At least one.

    Raises:
        InputError: none; names the option.
    """
    found = tuple(part.strip() for part in written.split(",") if part.strip())
    if not found:
        raise InputError(option, "name at least one", written)
    return found


def numbers_in(option: str, written: str, kind: Any) -> tuple[Any, ...]:
    """At least one, each made by `kind`.

    Raises:
        InputError: none, or what is no number; names the option.
    """
    try:
        return tuple(kind(part) for part in names_in(option, written))
    except ValueError:
        raise InputError(option, f"must be numbers ({kind.__name__}), joined by commas", written) from None
