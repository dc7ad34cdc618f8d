"""Recipes by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvquilt.errors import InputError, nearest
from kvquilt.writers.constant import Constant
from kvquilt.writers.digest import Digest
from kvquilt.writers.in_situ import InSitu
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.neighbours import Neighbours
from kvquilt.writers.recipe import Recipe
from kvquilt.writers.residual import Residual
from kvquilt.writers.trained import TRAINED

RESIDUAL = "residual-"  # and the layer


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


def check_recipe(name: str) -> None:
    """Raise `InputError` for a name that no recipe has, with the nearest."""
    if name not in RECIPES and name not in TRAINED and not name.removeprefix(RESIDUAL).isdecimal():
        raise InputError("writer", f"unknown{nearest(name, [*RECIPES, *TRAINED, RESIDUAL + '1'])}", name)


def recipe(name: str, given: Ingredients) -> Recipe:
    """The recipe of that name with its published settings; ``residual-N`` notes what enters layer N.

    Raises:
        InputError: no such recipe.
    """
    check_recipe(name)
    if name in RECIPES:
        return RECIPES[name](given)
    return Constant(name, Isolated(given.shared, (Residual(int(name.removeprefix(RESIDUAL))),)))
