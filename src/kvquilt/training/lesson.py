"""An exercise in tokens: what teacher and student both read."""

from __future__ import annotations

from dataclasses import dataclass

from kvquilt.errors import InputError, PromptError
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.model.capability import Capability
from kvquilt.template import PromptTemplate
from kvquilt.training.exercise import Exercise


@dataclass(frozen=True, slots=True)
class Lesson:
    """One set of documents and what is asked about it; ids of a prompt are ``opening + documents + question``.

    Attributes:
        name: which exercise of the data it is, for messages.
        opening: ids in front of the documents.
        questions: ids behind the last document, one tuple per question, up to where the answer begins.
    """

    name: str
    opening: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[int, ...], ...]

    @property
    def digest(self) -> str:
        """Of all ids; the name does not count."""
        fields = [("opening", encode_ids(self.opening))]
        fields += [("document", encode_ids(ids)) for ids in self.documents]
        fields += [("question", encode_ids(ids)) for ids in self.questions]
        return digest_fields("kvquilt 2026-11 lesson v1", fields)

    @property
    def read(self) -> tuple[int, ...]:
        """Ids in front of the questions."""
        return self.opening + tuple(i for ids in self.documents for i in ids)


def lesson(name: str, exercise: Exercise, template: PromptTemplate, capability: Capability, room: int) -> Lesson:
    """The engine's own prompts for an exercise.

    Args:
        room: tokens that must still fit behind a question.

    Raises:
        InputError: a document without tokens, or more than the context; names the exercise.
        PromptError: the template does not keep documents and question apart.
    """
    prompts = [template.filled(q, exercise.documents).runs(template.tokenizer) for q in exercise.questions]
    first = prompts[0]
    opening = first[0].ids if first[0].document is None else ()
    documents = tuple(run.ids for run in first if run.document is not None)
    if len(documents) < len(exercise.documents):
        raise InputError(name, "a document without tokens teaches nothing")
    tails = []
    for runs in prompts:
        if runs[-1].document is not None or tuple(r.ids for r in runs if r.document is not None) != documents:
            raise PromptError("template", "must keep documents and question apart", name)
        tails.append(runs[-1].ids)
    made = Lesson(name, opening, documents, tuple(tails))
    longest = len(made.read) + max(map(len, tails)) + room
    if longest > capability.max_length:
        rule = f"with its answer at most {capability.max_length} tokens, the model's context"
        raise InputError(name, rule, f"{longest} tokens")
    return made
