"""Studies: hit rates, attention, and what a small repair budget is best spent on."""
