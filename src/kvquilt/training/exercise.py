"""What a trainer takes: documents and questions about them, without answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvquilt.document import Document, check_documents
from kvquilt.errors import InputError


@dataclass(frozen=True, slots=True)
class Exercise:
    """One set of documents, in prompt order, and several questions about it, each a prompt of its own.

    There are no labels: the teacher, which is the model itself over the whole prompt, gives the answers.

    Raises:
        InputError: no documents, or one that is empty; no questions, or one that is not a text.
    """

    documents: tuple[Document, ...]
    questions: tuple[str, ...]

    def __post_init__(self) -> None:
        check_documents(self.documents)
        if not self.questions:
            raise InputError("questions", "at least one is needed")
        for index, question in enumerate(self.questions):
            if not isinstance(question, str) or not question.strip():
                raise InputError(f"questions[{index}]", "must be a non-empty string", type(question).__name__)
