"""How a method is written: ``NAME``, or ``NAME:OPTION,OPTION``, an option being a budget or ``field=value``."""

from __future__ import annotations

import math

from kvquilt.errors import InputError


def split(written: str) -> tuple[str, list[str]]:
    """Name and options; of ``field=value`` neither is checked."""
    name, _, options = written.partition(":")
    return name, [option for part in options.split(",") if (option := part.strip())]


def has_budget(written: str) -> bool:
    """Whether one of the options is a budget: the only one that is no ``field=value``."""
    return any("=" not in option for option in split(written)[1])


def without_budget(written: str) -> str:
    """The same method at the budget it has by itself."""
    name, options = split(written)
    return _joined(name, [option for option in options if "=" in option])


def with_option(written: str, option: str) -> str:
    """The same with one option more, the last."""
    name, options = split(written)
    return _joined(name, [*options, option])


def value_like(now: object, field: str, value: str) -> object:
    """`value` as what `field` holds now: a truth value, a number, several of them joined by ``+``, or text.

    Raises:
        InputError: it is no such thing.
    """
    if isinstance(now, bool):
        if value not in ("true", "false"):
            raise InputError(field, "must be true or false", value)
        return value == "true"
    if isinstance(now, tuple):
        return tuple(_whole(field, part) for part in value.split("+"))
    if isinstance(now, int):
        return _whole(field, value)
    return float(number("method", field, value)) if isinstance(now, float) else value


def number(where: str, field: str, value: str) -> int | float:
    """A whole number where `value` is written as one, else a float; `InputError` for anything else."""
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        raise InputError(where, f"{field} must be a number", value) from None


def _joined(name: str, options: list[str]) -> str:
    return f"{name}:{','.join(options)}" if options else name


def _whole(field: str, value: str) -> int:
    given = number("method", field, value)
    if not math.isfinite(given) or given != int(given):
        raise InputError(field, "must be a whole number", value)
    return int(given)
