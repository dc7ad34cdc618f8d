"""What a setting of a task must be."""

from __future__ import annotations

from collections.abc import Iterable

from kvquilt.errors import InputError, nearest


def check_count(field: str, value: object, least: int, most: int | None = None) -> None:
    """A whole number from `least`, to `most` where there is one.

    Raises:
        InputError: it is none, or out of range.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        raise InputError(field, f"must be an integer from {least}" + ("" if most is None else f" to {most}"), value)


def check_share(field: str, value: object) -> None:
    """A number from 0 to 1.

    Raises:
        InputError: it is none, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(field, "must be a number from 0 to 1", value)


def check_name(field: str, value: str, valid: Iterable[str]) -> None:
    """One of `valid`.

    Raises:
        InputError: it is not; the message gives the nearest.
    """
    names = tuple(valid)
    if value not in names:
        hint = nearest(value, names)  # without a near one it lists them, too
        raise InputError(field, f"must be one of {', '.join(names)}{hint if 'did you mean' in hint else ''}", value)
