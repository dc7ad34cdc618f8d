"""Prompts: ordered inline text and documents, and their token ids.

The rule everything rests on: the ids of a prompt are the concatenated ids of its parts, each tokenised alone, so a
document has the same ids wherever it stands. Chat templates are taken apart in `kvquilt.chat`, ids are made in
`kvquilt.tokens`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvquilt.chat import PINNED_DATE, chat_parts, continuation_parts
from kvquilt.document import Document, Inline, Part, check_documents
from kvquilt.errors import InputError
from kvquilt.tokens import Tokenizer, encoder

__all__ = ["PINNED_DATE", "Document", "Inline", "Prompt", "Run", "check_documents", "continuation", "segment_ids"]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of one origin: `document`, or inline text if that is ``None``. Never empty.

    Attributes:
        header, trailer: ids of soft tokens (`kvquilt.model.parts.SOFT`) that a writer put around the document; they
            take slots and positions and are no tokens of the prompt.
        placed: it takes slots and positions; a document that does not is seen by cross-attention alone.
    """

    ids: tuple[int, ...]
    document: Document | None = None
    header: tuple[int, ...] = ()
    trailer: tuple[int, ...] = ()
    placed: bool = True

    @property
    def rows(self) -> tuple[int, ...]:
        """Ids of all its slots."""
        return self.header + self.ids + self.trailer if self.placed else ()


@dataclass(frozen=True, slots=True, init=False)
class Prompt:
    """Ordered inline text and documents.

    Attributes:
        parts: as given; a plain string has become ``Inline(text)``, a user's text.
        continues: the prompt goes on behind tokens that are already in a cache, so nothing opens it: no
            beginning-of-text token, no space that a tokenizer puts before a text.

    Raises:
        InputError: no parts, or a part of another type.
    """

    parts: tuple[Part, ...]
    continues: bool

    def __init__(self, parts: Iterable[str | Part], *, continues: bool = False) -> None:
        if isinstance(parts, str | Inline | Document) or not isinstance(parts, Iterable):
            raise InputError("parts", "must be a list of strings, Inline and Document", type(parts).__name__)
        kept: list[Part] = []
        for index, part in enumerate(parts):
            if isinstance(part, str):
                kept.append(Inline(part))
            elif isinstance(part, Inline | Document):
                kept.append(part)
            else:
                raise InputError(f"parts[{index}]", "must be a string, Inline or Document", type(part).__name__)
        if not kept:
            raise InputError("parts", "at least one is needed")
        object.__setattr__(self, "parts", tuple(kept))
        object.__setattr__(self, "continues", continues)

    @classmethod
    def chat(
        cls,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        date: datetime.date | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """A conversation in the model's own chat template, with documents anywhere in it.

        Args:
            messages: ``{"role": str, "content": str | Document | list[str | Document]}`` each.
            date: for templates that print today's date; by default `PINNED_DATE`, so that the same messages give the
                same ids tomorrow.
            add_generation_prompt: end with the text that opens the assistant's answer.

        Raises:
            InputError: the messages have another form.
            PromptError: the tokenizer has no chat template, or its template refuses these messages or does not keep
                a message's text in one piece.
        """
        return cls(chat_parts(messages, tokenizer, date=date, add_generation_prompt=add_generation_prompt))

    @classmethod
    def plain(cls, system: str, documents: Iterable[Document], question: str) -> Prompt:
        """A prompt for base models, without a template: system text, documents, question, ``Answer:``."""
        opening = [Inline(f"{system}\n\n")] if system else []
        return cls([*opening, *documents, Inline(_plain_question(question))])

    @property
    def documents(self) -> tuple[Document, ...]:
        return tuple(part for part in self.parts if isinstance(part, Document))

    def runs(self, tokenizer: Tokenizer) -> tuple[Run, ...]:
        """The prompt's tokens by origin; their concatenation is the prompt.

        Neighbouring inline parts share a run, though each is tokenised alone. Parts without tokens have no run. Where
        the tokenizer opens texts with a beginning-of-text token, the first inline run begins with exactly one; if a
        document stands first, it gets a run of its own.

        Raises:
            PromptError: a text cannot be tokenised faithfully.
        """
        encode = encoder(tokenizer)
        runs: list[Run] = []
        for index, part in enumerate(self.parts):
            if isinstance(part, Document):
                ids, document = encode.segment(part.text, part.end, part.tenant), part
            else:
                front = index == 0 and not self.continues
                ids, document = encode.encode(part.text, control=part.control, front=front), None
            if document is None and ids and runs and runs[-1].document is None:
                runs[-1] = Run(runs[-1].ids + ids)
            elif ids:
                runs.append(Run(ids, document))
        return tuple(runs) if self.continues or encode.bos is None else tuple(_with_bos(runs, encode.bos))

    def ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """All token ids of the prompt."""
        return tuple(i for run in self.runs(tokenizer) for i in run.ids)


def segment_ids(document: Document, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The document's token ids, the same as in every prompt that holds it."""
    return encoder(tokenizer).segment(document.text, document.end, document.tenant)


def continuation(
    tokenizer: Tokenizer, question: str | Document | Sequence[str | Document], *, date: datetime.date | None = None
) -> Prompt:
    """What follows an assistant's answer to ask the next question; its ids go behind those of a live cache.

    The first ids are the template's end of the assistant's turn, so the cache must end with the answer's last text
    token, without the end-of-turn token that stopped it. Without a chat template it continues `Prompt.plain`.
    The parts stand behind text: no beginning-of-text token is added.

    Raises:
        InputError: the question has another form.
        PromptError: the template drops earlier answers or does not keep the question in one piece.
    """
    if not tokenizer.chat_template:
        if not isinstance(question, str):
            raise InputError(
                "question", "must be a string for a model without a chat template", type(question).__name__
            )
        return Prompt([Inline(_plain_question(question))], continues=True)
    return Prompt(continuation_parts(tokenizer, question, date=date), continues=True)


def _plain_question(question: str) -> str:
    if not isinstance(question, str):
        raise InputError("question", "must be a string", type(question).__name__)
    return f"\nQuestion: {question}\nAnswer:"


def _with_bos(runs: list[Run], bos: int) -> list[Run]:
    if not runs or runs[0].document is not None:
        return [Run((bos,)), *runs]
    opening = runs[0].ids
    return [Run(opening if opening[0] == bos else (bos, *opening)), *runs[1:]]
