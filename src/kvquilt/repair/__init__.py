"""Online repair: selectors choose rows of reused documents, one operator recomputes them."""
