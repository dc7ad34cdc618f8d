"""What the gate measures on: sample prompts of the user's own documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvquilt.errors import ContextLengthError
from kvquilt.fidelity import truth
from kvquilt.placement import place_runs
from kvquilt.prompt import Document, segment_ids
from kvquilt.writers.loaded import soft_rows

if TYPE_CHECKING:
    from kvquilt.engine import Engine

_DOCUMENTS = 4  # in one prompt
_QUESTION_AND_ANSWER = 64  # tokens
_QUESTION_TOKENS = 24
_ASK = "Write one short question about a fact that the document states."
_LONGEST = 1024  # tokens of one document, which bounds the time of a sample


def sample_prompts(
    documents: Sequence[Document], fillers: Sequence[Document], count: int
) -> list[tuple[list[Document], int]]:
    """Documents and the target's index: every document asked about in turn, the target at every place in turn.

    Fewer than four documents are joined by fillers, since a document alone stands behind an exact prefix, where
    nothing is approximate and nothing would be measured.
    """
    pool = [*documents, *fillers[: max(0, _DOCUMENTS - len(documents))]]
    made = []
    for n in range(count):
        at = n * len(documents) // count
        chosen = [pool[(at + k) % len(pool)] for k in range(1, _DOCUMENTS)]
        target = n % _DOCUMENTS
        chosen.insert(target, documents[at])
        made.append((chosen, target))
    return made


def make_question(engine: Engine, document: Document, tenant: str | None) -> str:
    """A question that the model asks about the document; a fixed one where it asks none.

    Real questions matter: asked to repeat a text, a model copies, which pure reuse hardly harms.
    """
    placement = place_runs(engine.prompt(_ASK, [document]).runs(engine.model.tokenizer))
    ids = truth(engine, placement, tenant, _QUESTION_TOKENS).ids
    text: str = engine.model.tokenizer.decode(ids, skip_special_tokens=True)
    made, mark, _ = text.strip().partition("?")
    if mark and "\n" not in made:
        return made + mark
    return f"What does the text that begins with “{' '.join(document.text.split()[:12])}” say?"


def fit_documents(engine: Engine, documents: Sequence[Document]) -> list[Document]:
    """The documents with long ones cut, so that a sample prompt of four, a question and an answer fit the context."""
    around = len(engine.prompt("?", [Document("x")]).ids(engine.model.tokenizer)) + _QUESTION_AND_ANSWER
    soft = max(map(soft_rows, engine.reader.trained.values()), default=0)
    room = min(_LONGEST, (engine.model.capability.max_length - around) // _DOCUMENTS - soft)
    if room < 1:
        raise ContextLengthError("system", f"the prompt without documents takes {around} tokens and leaves no room")
    fitting = []
    for document in documents:
        tokens = len(segment_ids(document, engine.model.tokenizer))
        if tokens > room:
            text = document.text[: len(document.text) * room // (tokens + 1)]
            document = Document(text, id=document.id, end=document.end)
        fitting.append(document)
    return fitting


def builtin_documents() -> tuple[Document, ...]:
    """Help texts of the standard library, for a gate without, or with few, documents of the user's own."""
    from pydoc_data.topics import topics

    names = ("assert", "break", "continue", "del", "global", "if", "import", "pass", "raise", "return", "while", "with")
    return tuple(Document(topics[n].strip()[:900], id=f"python-help-{n}") for n in names)
