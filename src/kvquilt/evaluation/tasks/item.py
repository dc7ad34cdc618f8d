"""One example of a task: what is asked over which documents, and what is right."""

from __future__ import annotations

from dataclasses import dataclass

from kvquilt.document import Document, check_documents, check_text
from kvquilt.errors import InputError


@dataclass(frozen=True, slots=True)
class Item:
    """A question over documents in prompt order.

    Attributes:
        id: unique within a task, a split and a size.
        answers: every accepted answer; the first is the canonical one.
        gold: indices of the documents that the answer rests on.
        group: what is resampled and split as one, since its items are not independent: a person, an article.
        task: the name of the task.
        kind: what sort of question it is, where the task tells sorts apart: scores are also told by kind.

    Raises:
        InputError: no documents, an empty question, no answers or an empty one, gold that is no document or one of them
            twice; a text that is none (see `check_text`).
    """

    id: str
    documents: tuple[Document, ...]
    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    group: str
    task: str
    kind: str = ""

    def __post_init__(self) -> None:
        for name in ("id", "question", "group", "kind"):
            check_text(name, getattr(self, name))
        for answer in self.answers:
            check_text("answers", answer)
        check_documents(self.documents)
        if not self.question.strip():
            raise InputError("question", "must not be empty", self.id)
        if not self.answers or not all(answer.strip() for answer in self.answers):
            raise InputError("answers", "at least one is needed and none may be empty", self.id)
        if not all(0 <= index < len(self.documents) for index in self.gold):
            raise InputError("gold", f"must be indices of {len(self.documents)} documents", self.gold)
        if len(set(self.gold)) < len(self.gold):
            raise InputError("gold", "must have no document twice", self.gold)
