"""Budgets: how many token-layers a request may spend beyond pure reuse, and the cut of a ranking to what fits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from kvquilt.errors import InputError

_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%")
_COUNT = re.compile(r"\d{1,18}")


@dataclass(frozen=True, slots=True)
class Budget:
    """Token-layers (one row through one layer), as a share or absolute; exactly one of the two is set.

    Attributes:
        share: of reusable tokens x layers, 0 to 1.
        token_layers: absolute.
    """

    share: float | None = None
    token_layers: int | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.token_layers is None):
            raise InputError(
                "budget", "give a share or a number of token-layers, not both", (self.share, self.token_layers)
            )
        if self.share is not None and not 0 <= self.share <= 1:  # NaN fails too
            raise InputError("budget", "a share lies between 0% and 100%", f"{self.share * 100:g}%")
        if self.token_layers is not None and self.token_layers < 0:
            raise InputError("budget", "a number of token-layers is at least 0", self.token_layers)

    @classmethod
    def parse(cls, given: object) -> Self:
        """A `Budget` from ``"5%"``, ``"13000"`` or an int (token-layers), or a float (a share).

        Raises:
            InputError: anything else, a share outside 0 to 100 %, a negative number.
        """
        if isinstance(given, cls):
            return given
        rule = "write a share such as 5%, or a whole number of token-layers"
        if isinstance(given, bool):
            raise InputError("budget", rule, given)
        if isinstance(given, int):
            return cls(token_layers=given)
        if isinstance(given, float):
            return cls(share=given)
        text = given.strip() if isinstance(given, str) else ""
        if found := _SHARE.fullmatch(text.removeprefix("-")):
            return cls(share=float(found[1]) / 100 * (-1 if text.startswith("-") else 1))
        if _COUNT.fullmatch(text.removeprefix("-")):
            return cls(token_layers=int(text))
        raise InputError("budget", rule, given)

    def allows(self, tokens: int, layers: int) -> int:
        """Token-layers for `tokens` reusable tokens: a share rounded down, an absolute number as it is.

        The latter may exceed all of them, so that a probe and every row can be paid for.
        """
        if self.token_layers is not None:
            return self.token_layers
        # a share of 0.07 times 100 must be 7, not 6: floats fall just short of what was written
        return math.floor((self.share or 0.0) * tokens * layers + 1e-9)

    def __str__(self) -> str:
        return str(self.token_layers) if self.share is None else f"{self.share * 100:g}%"
