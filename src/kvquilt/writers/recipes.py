"""Recipes by name."""

from __future__ import annotations

from collections.abc import Callable

from kvquilt.errors import InputError, nearest
from kvquilt.writers.constant import Constant
from kvquilt.writers.in_situ import InSitu
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.neighbours import Neighbours
from kvquilt.writers.recipe import Recipe

RECIPES: dict[str, Callable[[tuple[int, ...], int], Recipe]] = {
    "isolated": lambda shared, limit: Constant(),
    "shared-prefix": lambda shared, limit: Constant(Isolated(shared)),
    "neighbours": Neighbours,
    "in-situ": InSitu,
}


def recipe(name: str, shared: tuple[int, ...], limit: int) -> Recipe:
    """The recipe of that name with its published settings.

    Args:
        shared: ids that documents are encoded behind, but for ``isolated``.
        limit: tokens that the model can take.

    Raises:
        InputError: no such recipe.
    """
    if name not in RECIPES:
        raise InputError("recipe", f"unknown{nearest(name, RECIPES)}", name)
    return RECIPES[name](shared, limit)
