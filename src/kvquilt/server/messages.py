"""From what a client sent to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kvquilt.errors import InputError
from kvquilt.prompt import Document, Inline, Prompt, check_documents
from kvquilt.server.asked import ChatAsked, TextAsked, TokenizeAsked
from kvquilt.server.fields import DocumentPart, Message
from kvquilt.tokens import Tokenizer

Find = Callable[[str], Document]  # an uploaded document by its id


def parts_in(asked: ChatAsked | TextAsked | TokenizeAsked) -> Iterator[DocumentPart]:
    """Document parts in the order in which they stand."""
    if isinstance(asked, TextAsked):
        yield from asked.kvquilt.documents
        return
    for message in asked.messages or ():
        if isinstance(message.content, list):
            yield from (part for part in message.content if isinstance(part, DocumentPart))


def named_in(asked: ChatAsked | TextAsked | TokenizeAsked) -> list[str]:
    """Ids of documents that must have been uploaded."""
    return [part.id for part in parts_in(asked) if part.text is None and part.id is not None]


def make_prompt(asked: ChatAsked | TextAsked | TokenizeAsked, tokenizer: Tokenizer, find: Find) -> Prompt:
    """The prompt that these fields ask for.

    Raises:
        InputError: a document without text or twice, or in a message of another role than system and user.
        PromptError: the model has no chat template, or its template refuses these messages.
    """
    if isinstance(asked, TextAsked):
        prompt = Prompt([*(_document(part, find) for part in parts_in(asked)), Inline(asked.text)])
    elif asked.messages is None:
        prompt = Prompt([asked.prompt or ""])
    else:
        prompt = Prompt.chat([_message(i, message, find) for i, message in enumerate(asked.messages)], tokenizer)
    if prompt.documents:
        check_documents(prompt.documents)
    return prompt


def made_document(id: str | None, text: str, title: str | None) -> Document:
    """A document whose title is the first line that the model reads."""
    named: dict[str, Any] = {} if id is None else {"id": id}
    return Document(text if title is None else f"{title}\n{text}", **named)


def _document(part: DocumentPart, find: Find) -> Document:
    if part.text is None:
        assert part.id is not None  # checked with the fields
        found = find(part.id)
    else:
        found = made_document(part.id, part.text, part.title)
    return found if part.score is None else replace(found, score=part.score)


def _message(index: int, message: Message, find: Find) -> dict[str, Any]:
    # newer models of OpenAI call the system's role so; chat templates do not know it
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None or isinstance(content, str):
        return {"role": role, "content": content or ""}
    if role not in ("system", "user") and any(isinstance(part, DocumentPart) for part in content):
        raise InputError(f"messages.{index}.role", "documents stand in system and user messages", role)
    return {"role": role, "content": list(_contents(content, find))}


def _contents(content: Iterable[Any], find: Find) -> Iterator[str | Document]:
    for part in content:
        yield _document(part, find) if isinstance(part, DocumentPart) else part.text
