"""The parts of a prompt: documents that are reused, and inline text that is not."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from blake3 import blake3

from kvquilt.errors import InputError


@dataclass(frozen=True, slots=True)
class Document:
    """A reusable text with a name. Equality ignores `score`; `repr` never shows the text.

    Attributes:
        text: what the model reads, byte for byte. May be empty inside a `Prompt`; `check_documents` refuses that.
        id: the name shown in reports; by default ``doc-`` and 12 hex characters of the text's digest. Only a label:
            the key of a compiled segment comes from token ids.
        end: text that always follows the document and is compiled with it, so that documents are separated at no
            cost per request.
        score: the retriever's score, larger is better; ``None`` when nothing ranked it.
        tenant: whose document it is; ``None``: whoever asks. Only a public one (`kvquilt.identity.PUBLIC`) may stand in
            another's prompt; its segments are then shared with all who read it.

    Raises:
        InputError: a field of another type, text with NUL characters or lone surrogates, an empty id, a score that is
            not a finite number.
    """

    text: str = field(repr=False)
    id: str = None  # type: ignore[assignment]  # None asks for the digest and is replaced before anyone reads it
    end: str = field(default="\n", repr=False)
    score: float | None = field(default=None, compare=False)
    tenant: str | None = None

    def __post_init__(self) -> None:
        raw = check_text("Document.text", self.text)
        check_text("Document.end", self.end)
        given: object = self.id
        if given is None:
            object.__setattr__(self, "id", f"doc-{blake3(raw).hexdigest()[:12]}")
        elif not isinstance(given, str) or not given.strip():
            raise InputError("Document.id", "must be a non-empty string", given)
        else:
            check_text("Document.id", given)
        if self.tenant is not None:
            check_text("Document.tenant", self.tenant)
        if self.score is not None:
            number = isinstance(self.score, int | float) and not isinstance(self.score, bool)
            if not number or not abs(self.score) <= sys.float_info.max:
                raise InputError("Document.score", "must be a finite number or None", self.score)
            object.__setattr__(self, "score", float(self.score))


@dataclass(frozen=True, slots=True)
class Inline:
    """Text between documents, computed anew in every request.

    Attributes:
        text: the text; ``repr`` does not show it.
        control: ``True`` for text of the model's own template, whose control tokens are parsed. ``False`` for a user's
            text, in which ``<|im_end|>`` is ten characters and never a control token.
    """

    text: str = field(repr=False)
    control: bool = False

    def __post_init__(self) -> None:
        check_text("Inline.text", self.text)
        if not isinstance(self.control, bool):
            raise InputError("Inline.control", "must be True or False", self.control)


Part = Inline | Document


def check_text(name: str, text: object) -> bytes:
    """The text in UTF-8. Raises `InputError` naming the field `name`, never quoting the text."""
    if not isinstance(text, str):
        raise InputError(name, "must be a string", type(text).__name__)
    if "\x00" in text:
        raise InputError(
            name, f"must be text; it has a NUL character at offset {text.index(chr(0))}, so it looks binary"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        rule = f"must be valid Unicode; it has a lone surrogate at offset {error.start}"
        raise InputError(name, rule) from None  # the chained error would carry the text


def check_owners(documents: Iterable[Document], *tenants: str | None) -> None:
    """Raise `InputError` naming the first document that is none of these tenants', nor of whoever asks."""
    for index, document in enumerate(documents):
        if document.tenant is not None and document.tenant not in tenants:
            raise InputError(f"documents[{index}]", "belongs to another tenant", document.id)


def check_documents(documents: Iterable[Document]) -> tuple[Document, ...]:
    """The documents as a tuple, or an `InputError` naming the first that breaks a rule.

    The rules: at least one; every one a `Document` with something other than whitespace in it; no id twice. A repeated
    id is refused in both cases, with other text (one of the two would be cited for the other's words) and with the
    same text (the model would read it twice, at full length, which is never what a caller meant).
    The same text under two ids is allowed: it is compiled once.
    """
    if isinstance(documents, str | bytes | Document) or not isinstance(documents, Iterable):
        raise InputError("documents", "must be a list of Document", type(documents).__name__)
    checked: list[Document] = []
    first: dict[str, int] = {}
    for index, document in enumerate(documents):
        if not isinstance(document, Document):
            raise InputError(f"documents[{index}]", "must be a Document", type(document).__name__)
        if not document.text.strip():
            raise InputError(f"documents[{index}].text", f"must not be empty (id {document.id!r})")
        earlier = first.setdefault(document.id, index)
        if earlier != index:
            same = checked[earlier] == document
            rule = f"duplicate of documents[{earlier}]" if same else f"same id as documents[{earlier}] with other text"
            raise InputError(f"documents[{index}].id", rule, document.id)
        checked.append(document)
    if not checked:
        raise InputError("documents", "at least one is needed")
    return tuple(checked)
