"""What is known of an uploaded document without its text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvquilt.server.texts import Uploaded


class State(StrEnum):
    """Of an uploaded document."""

    QUEUED = "queued"
    COMPILING = "compiling"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True)
class Entry:
    """What is known of a document without its text.

    Attributes:
        digest: of what the model reads: another text under this id is another digest.
        progress: documents compiled and in all, of the portion that it is compiled with.
        error: why it failed; ids and numbers.
        text_bytes: of text and title.
        segment_bytes: what it takes compiled, as far as it is known.
    """

    id: str
    title: str | None
    created: int
    characters: int
    digest: str
    state: State = State.QUEUED
    progress: tuple[int, int] | None = None
    error: str | None = None
    text_bytes: int = 0
    segment_bytes: int = 0

    @classmethod
    def of(cls, uploaded: Uploaded, segment_bytes: int = 0) -> Entry:
        text = uploaded.document.text
        return cls(
            uploaded.id, uploaded.title, uploaded.created, len(text), uploaded.digest,
            text_bytes=len(text.encode()), segment_bytes=segment_bytes,
        )  # fmt: skip

    def same(self, other: Entry) -> bool:
        """Whether both are the same document."""
        return (self.id, self.digest, self.title) == (other.id, other.digest, other.title)

    def as_dict(self) -> dict[str, Any]:
        done = None if self.progress is None else {"done": self.progress[0], "total": self.progress[1]}
        return {
            "id": self.id, "object": "document", "title": self.title, "created": self.created,
            "characters": self.characters, "state": self.state.value, "progress": done, "error": self.error,
        }  # fmt: skip
