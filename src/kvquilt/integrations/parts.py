"""What every framework's adapter does: retrieved texts to document parts of a request, and its account back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, SupportsFloat

from kvquilt.document import Document
from kvquilt.errors import InputError

if TYPE_CHECKING:
    import openai

URL, KEY = "http://127.0.0.1:8000/v1", "unused"  # of a server on this machine, which asks for no key
Found = tuple[str | None, str | None, SupportsFloat | None]  # id, the exact text that the model reads, score

_LONGEST = 512  # characters of an id that the server takes
_PUBLIC = "public/"  # what ids of public documents begin with; no text is sent under one


def document_parts(found: Iterable[Found]) -> list[dict[str, Any]]:
    """Content parts for a message, in the order of `found`.

    A document without an id that a server takes is named by its text's digest. What is found twice stands once, where
    it was first, with the better score. Another text under an id that is taken keeps the id with its digest behind it:
    passages of one source often share one. A blank text is left out: a server takes none, and it says nothing.

    Raises:
        InputError: a text or a score that is none.
    """
    parts: dict[str, dict[str, Any]] = {}
    for id, text, score in found:
        if text is None:  # frameworks have documents that are pictures or tables
            raise InputError("documents", "must have a text", id)
        if isinstance(text, str) and not text.strip():
            continue
        digest = Document(text).id
        name = id if id is not None and _taken(id) else digest
        if name in parts and parts[name]["text"] != text:
            name = f"{name[: _LONGEST - len(digest) - 1]}#{digest}"
        part = parts.setdefault(name, {"type": "document", "id": name, "text": text})
        if score is not None and math.isfinite(number := _number(score, name)):
            part["score"] = max(number, part.get("score", number))
    return list(parts.values())


def _taken(id: str) -> bool:
    """Whether a server takes a text under this id."""
    try:
        Document("a text", id=id)
    except InputError:
        return False
    return len(id) <= _LONGEST and not id.startswith(_PUBLIC)


def _number(score: SupportsFloat, id: str) -> float:
    try:
        return float(score)
    except (TypeError, ValueError, OverflowError):
        raise InputError("documents", "must have numbers as scores, or none", id) from None


def content(parts: list[dict[str, Any]], question: str) -> list[dict[str, Any]]:
    """The content of a user's message: documents, then the question."""
    return [*parts, {"type": "text", "text": question}]


def noted(answer: Any) -> dict[str, Any]:
    """What a completion of OpenAI's client, or a chunk of one, tells beside its text, as far as it does: ``usage``,
    ``finish_reason``, and the account, ``kvquilt``."""
    found = {
        "usage": answer.usage and answer.usage.model_dump(exclude_none=True),
        "finish_reason": answer.choices[0].finish_reason if answer.choices else None,
        "kvquilt": (answer.model_extra or {}).get("kvquilt"),
    }
    return {name: value for name, value in found.items() if value is not None}


def pieces(client: openai.OpenAI, **asked: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A streamed answer: pieces of its text, and what each chunk tells beside them."""
    with client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked) as stream:
        for chunk in stream:
            yield (chunk.choices[0].delta.content if chunk.choices else None) or "", noted(chunk)
