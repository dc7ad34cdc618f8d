"""The prompts of `Engine.ask`: system message, documents, question, in the model's chat template if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvquilt.errors import InputError, PromptError
from kvquilt.prompt import Document, Prompt, check_documents
from kvquilt.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """What stands around documents and question.

    Attributes:
        system: the system message; "" for none. Where the chat template takes none, it opens the user's turn.
        system_role: whether the chat template takes one.
    """

    tokenizer: Tokenizer
    system: str
    system_role: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "system_role", _has_system_role(self.tokenizer))

    def filled(self, question: str, documents: Sequence[Document]) -> Prompt:
        """The prompt of one question."""
        if not self.tokenizer.chat_template:
            return Prompt.plain(self.system, documents, question)
        content: list[str | Document] = [*documents, f"\nQuestion: {question}"]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.system and self.system_role:
            messages.insert(0, {"role": "system", "content": self.system})
        elif self.system:
            content.insert(0, f"{self.system}\n\n")
        return Prompt.chat(messages, self.tokenizer)

    def asked(self, question: str | Prompt, documents: Sequence[Document] | None) -> Prompt:
        """The prompt of a question over documents, or a whole prompt, which holds its own.

        Raises:
            InputError: an empty question, no documents, or documents beside a whole prompt.
        """
        if isinstance(question, Prompt):
            if documents is not None:
                raise InputError("documents", "must not be given beside a Prompt, which holds its own")
            return question
        check_question(question)
        if documents is None:
            raise InputError("documents", "at least one is needed")
        return self.filled(question, check_documents(documents))

    @property
    def opening(self) -> tuple[int, ...]:
        """Ids that all its prompts begin with, whatever the documents."""
        first = self.filled("?", [Document("x")]).runs(self.tokenizer)[0]
        return first.ids if first.document is None else ()


def check_question(question: object) -> None:
    """Raise `InputError` unless it is a text with something in it."""
    if not isinstance(question, str) or not question.strip():
        raise InputError("question", "must be a non-empty text")


def user_text(prompt: Prompt) -> str:
    """What the user wrote beside the documents: what BM25 ranks them by."""
    return " ".join(p.text for p in prompt.parts if not isinstance(p, Document) and not p.control)


def _has_system_role(tokenizer: Tokenizer) -> bool:
    """Whether the chat template takes a system message."""
    if not tokenizer.chat_template:
        return False
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    try:
        Prompt.chat(messages, tokenizer)
    except PromptError:
        return False
    return True
