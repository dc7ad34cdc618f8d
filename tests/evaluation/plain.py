"""What a task made, as plain values whose digest says whether anything of it has changed."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvquilt.prompt import Document


def plain(value: Any) -> Any:
    """Dataclasses as tuples of their fields; of a document what a task decides, which is not whose it is."""
    if isinstance(value, Document):
        return value.text, value.id, value.end, value.score
    if dataclasses.is_dataclass(value):
        return tuple(plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value))
    return {key: plain(each) for key, each in value.items()} if isinstance(value, dict) else value
