"""A run: every arm on every item, its controls, and what stays on disk."""
