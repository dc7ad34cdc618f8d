"""Questions that the model itself writes about documents, so that a folder of them is enough to train on."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvquilt.document import Document
from kvquilt.files import write_atomically, writing
from kvquilt.identity import digest_fields
from kvquilt.model.language_model import LanguageModel
from kvquilt.template import PromptTemplate
from kvquilt.training.exercise import Exercise
from kvquilt.training.lesson import lesson
from kvquilt.training.teacher import Teacher

log = logging.getLogger(__name__)
# Real questions matter: asked to repeat or to sum up a text, a model copies, which pure reuse hardly harms. Greedy
# answers to several instructions differ more, and make more sense, than sampled answers to one.
ASKS = (
    "Write one short question about a fact that the document states.",
    "Write one short question that begins with “What”, and that the document answers.",
    "Write one short question that begins with “How”, and that the document answers.",
    "Write one short question that begins with “Why”, and that the document answers.",
    "Write one short question that begins with “When” or “Where”, and that the document answers.",
    "Write one short question that begins with “Which”, and that the document answers.",
    "Write one short question whose answer is a name in the document.",
    "Write one short question whose answer is a number or a value in the document.",
    "Write one short question about the first sentence of the document.",
    "Write one short question about the end of the document.",
    "Write one short question about the least known fact in the document.",
    "Write one short question that somebody would ask who has to use what the document describes.",
)
_TOKENS = 32  # of a question
_QUESTION_WORDS = frozenset(["what", "when", "where", "which", "does"])


@dataclass(eq=False, slots=True)
class Asker:
    """Asks about documents, each time the same, and remembers what it asked.

    Attributes:
        count: instructions per document, hence questions at most: some give none, or one twice.
        file: JSONL of what was asked before, by digest; a stopped run does not ask again.
    """

    model: LanguageModel
    template: PromptTemplate
    count: int
    seed: int
    file: Path | None = None
    invented: int = field(init=False, default=0)
    _known: dict[str, list[str]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.count = min(self.count, len(ASKS))
        if self.file is not None and self.file.exists():
            for line in self.file.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    known = json.loads(line)
                    self._known[known["of"]] = [str(each) for each in known["questions"]]
                except (ValueError, KeyError, TypeError):
                    log.warning("%s has a damaged line; what it was about is asked again", self.file)

    def questions(
        self, documents: Sequence[Document], progress: Callable[[int, int], object] | None = None
    ) -> list[list[str]]:
        """At least one question about each document. `invented` counts documents that the model asked nothing about.

        Raises:
            InputError: a document does not fit the context.
            StoreUnavailableError: the file cannot be written.
        """
        out, fresh = [], 0
        try:
            for n, document in enumerate(documents):
                name = self._digest(document)
                if name not in self._known:
                    self._known[name] = self._asked(document)
                    fresh += 1
                    if fresh % 8 == 0:
                        self._keep()
                made = self._known[name]
                self.invented += not made
                out.append(made or [stand_in(document)])
                if progress is not None:
                    progress(n + 1, len(documents))
        finally:  # whoever stops it has paid for what was asked
            if fresh % 8:
                self._keep()
        if self.invented:
            log.warning(
                "the model asked nothing of its own about %d of %d documents; they have a question by their first "
                "words. A larger model, or questions of your own in a JSONL file, would teach more",
                self.invented, len(documents),
            )  # fmt: skip
        return out

    def _asked(self, document: Document) -> list[str]:
        asks = random.Random(f"{self.seed} asks {document.text}").sample(ASKS, self.count)
        exercise = Exercise((document,), tuple(asks))
        asking = lesson(f"document {document.id!r}", exercise, self.template, self.model.capability, _TOKENS)
        found: dict[str, None] = {}
        for target in Teacher(_TOKENS, top=1).targets(self.model, asking):
            text = self.model.tokenizer.decode(list(target.answer), skip_special_tokens=True)
            if (made := one_question(text)) and is_about(made, document.text):
                found.setdefault(made)
        return list(found)

    def _digest(self, document: Document) -> str:
        return digest_fields("kvquilt 2026-11 questions v2", [
            ("model", self.model.fingerprint.digest), ("system", self.template.system), ("document", document.text),
            ("end", document.end), ("asks", "\n".join(ASKS)), ("count", str(self.count)), ("seed", str(self.seed)),
        ])  # fmt: skip

    def _keep(self) -> None:
        if self.file is not None:
            lines = [json.dumps({"of": of, "questions": made}) + "\n" for of, made in self._known.items()]
            with writing(self.file):
                # private: questions tell what the documents say, and nobody but a training run reads them
                write_atomically(self.file, "".join(lines).encode(), private=True)


def one_question(text: str) -> str:
    """The question that an answer is or begins with; "" if it is none."""
    made, mark, _ = text.strip().partition("?")
    made = made.removeprefix("Question:").strip().strip('"“*')
    return made + mark if mark and made and "\n" not in made else ""


def is_about(question: str, text: str) -> bool:
    """Whether they share a word; small models also ask about nothing. Told of Latin letters only, in words of four."""
    asked, there = (set(re.findall(r"[a-zß-ÿ]{4,}", each.lower())) for each in (question, text))
    asked -= _QUESTION_WORDS
    return not asked or bool(asked & there)


def stand_in(document: Document) -> str:
    """What is asked about a document if the model asks nothing."""
    return f"What does the text that begins with “{' '.join(document.text.split()[:12])}” say?"
