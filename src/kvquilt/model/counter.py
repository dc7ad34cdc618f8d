"""What a forward computed."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class RowCounter:
    """Rows that passed the decoder layers, counted by hooks on the model.

    Attributes:
        rows: rows that entered the first layer (batch x rows).
        token_layers: rows that entered a layer, summed over all layers.
        unfinished: those of them whose layer was left once keys and values (and queries) were there.
        pairs: query-key pairs attended to, over all layers.
        besides: operations of layers that the model has not by itself.
    """

    rows: int = 0
    token_layers: int = 0
    unfinished: int = 0
    pairs: int = 0
    besides: float = 0.0

    def charge(self, projection_share: float) -> int:
        """Token-layers to charge: an unfinished row costs its projections only, rounded up together.

        Args:
            projection_share: weights of a layer's query, key and value projections over all its weights.
        """
        return self.token_layers - self.unfinished + math.ceil(self.unfinished * projection_share)
