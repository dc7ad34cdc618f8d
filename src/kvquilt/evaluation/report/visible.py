"""What people and models wrote, shown without doing anything: no colour, no bell, no cursor that moves."""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """`text` with a sign in the place of every control character and lone surrogate; line breaks and tabs stay."""
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text)
