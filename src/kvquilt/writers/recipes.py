"""Recipes by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvquilt.errors import InputError, nearest
from kvquilt.writers.constant import Constant
from kvquilt.writers.digest import Digest
from kvquilt.writers.encoder import ENCODER
from kvquilt.writers.in_situ import InSitu
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.link_tokens import LINK_TOKENS
from kvquilt.writers.neighbours import Neighbours
from kvquilt.writers.recipe import Recipe
from kvquilt.writers.residual import Residual
from kvquilt.writers.trained import TRAINED

KINDS = (*TRAINED, LINK_TOKENS, ENCODER)  # of trained writers; names of their methods, too
RESIDUAL = "residual-"  # and the layer
_NAME = re.compile(r"[A-Za-z][\w.-]*")


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What recipes are made of.

    Attributes:
        shared: ids that documents are encoded behind, but for ``isolated``.
        limit: tokens that the model can take.
        repeat: ids that ask to repeat the text before them; for ``digest``.
    """

    shared: tuple[int, ...]
    limit: int
    repeat: tuple[int, ...]


RECIPES: dict[str, Callable[[Ingredients], Recipe]] = {
    "isolated": lambda given: Constant("isolated", Isolated()),
    "shared-prefix": lambda given: Constant("shared-prefix", Isolated(given.shared)),
    "neighbours": lambda given: Neighbours(given.shared, given.limit),
    "in-situ": lambda given: InSitu(given.shared, given.limit),
    "digest": lambda given: Constant("digest", Isolated(given.shared, (Digest(given.repeat),))),
}


def check_recipe(name: str, loaded: Iterable[str] | None = None) -> None:
    """Raise `InputError` for a name that no recipe has, with the nearest.

    Args:
        loaded: names of the trained writers at hand; None where they are not known yet, so that any name may be one.
    """
    if _built_in(name) or name in KINDS or (_NAME.fullmatch(name) if loaded is None else name in loaded):
        return
    raise InputError("writer", f"unknown{nearest(name, [*RECIPES, *KINDS, RESIDUAL + '1', *(loaded or ())])}", name)


def check_free(name: str) -> None:
    """Raise `InputError` unless a trained writer can be called so."""
    if not _NAME.fullmatch(name):
        raise InputError("writer", "a name is a letter, then letters, digits, and . _ -", name)
    if _built_in(name):
        raise InputError("writer", "is the name of a recipe; give the writer another", name)


def _built_in(name: str) -> bool:
    return name in RECIPES or name.removeprefix(RESIDUAL).isdecimal()


def recipe(name: str, given: Ingredients) -> Recipe:
    """The recipe of that name with its published settings; ``residual-N`` notes what enters layer N.

    Raises:
        InputError: no such recipe.
    """
    check_recipe(name, ())
    if name in RECIPES:
        return RECIPES[name](given)
    return Constant(name, Isolated(given.shared, (Residual(int(name.removeprefix(RESIDUAL))),)))
