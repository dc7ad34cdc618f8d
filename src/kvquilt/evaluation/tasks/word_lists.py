"""How the generated tasks write their pools of words."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def joined(heads: str, tails: str) -> tuple[str, ...]:
    """Every head with every tail."""
    return tuple(head + tail for head in words(heads) for tail in words(tails))
