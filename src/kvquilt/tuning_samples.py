"""What tuning measures on: prompts in two halves that share no question and no target document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvquilt.errors import InputError
from kvquilt.gate_report import LEAST_PROMPTS
from kvquilt.gate_samples import builtin_documents, fit_documents, make_question, sample_prompts
from kvquilt.prompt import Document
from kvquilt.retrieval import Index, ranked_documents

if TYPE_CHECKING:
    from kvquilt.engine import Engine


@dataclass(frozen=True, slots=True)
class Question:
    """One question of the user's own.

    Attributes:
        answers: texts that count as right; empty where nobody knows.
    """

    text: str
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt to measure on: documents, the question, known answers, documents best first."""

    documents: list[Document]
    question: str
    answers: tuple[str, ...]
    ranking: list[int]


def read_questions(path: Path) -> list[Question]:
    """Questions from a JSONL file: ``{"question": text, "answers": [text, ...]}`` a line, answers if known.

    Raises:
        InputError: with the line, if one has another form; if the file cannot be read or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("questions", f"the file cannot be read: {error}", str(path)) from None
    found = [_question(line, n + 1) for n, line in enumerate(lines) if line.strip()]
    if not found:
        raise InputError("questions", "the file holds no question", str(path))
    return found


def _question(line: str, number: int) -> Question:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    text = data.get("question") if isinstance(data, dict) else None
    answers = data.get("answers", []) if isinstance(data, dict) else None
    answers = [answers] if isinstance(answers, str) else answers
    valid = isinstance(text, str) and text.strip() and isinstance(answers, list)
    if not valid or not all(isinstance(each, str) and each.strip() for each in answers or ()):
        raise InputError("questions", 'each line is {"question": text, "answers": [text, ...]}', f"line {number}")
    return Question(str(text), tuple(answers or ()))


def halved_samples(
    engine: Engine, documents: Sequence[Document], questions: Sequence[Question], prompts: int, tenant: str | None
) -> tuple[list[Sample], list[Sample]]:
    """Prompts to choose on and prompts to report on; no target document and no question is in both."""
    documents = fit_documents(engine, documents)
    if questions:
        return _asked(engine, documents, questions, prompts)
    if len(documents) < 2:
        raise InputError("documents", "at least two are needed: one to choose on, one to report on", len(documents))
    fillers = fit_documents(engine, builtin_documents())
    made = []
    for half in (documents[::2], documents[1::2]):
        samples = []
        for chosen, target in sample_prompts(half, fillers, max(LEAST_PROMPTS, prompts // 2)):
            text = make_question(engine, chosen[target], tenant)
            ranking = [target, *(n for n in ranked_documents(text, chosen) if n != target)]
            samples.append(Sample(chosen, text, (), ranking))
        made.append(samples)
    return made[0], made[1]


def _asked(
    engine: Engine, documents: Sequence[Document], questions: Sequence[Question], prompts: int
) -> tuple[list[Sample], list[Sample]]:
    """The user's questions with the retriever's documents, by whether the best one is an odd or an even document."""
    index = Index(documents)
    place = {document.id: n for n, document in enumerate(documents)}
    halves: tuple[list[Sample], list[Sample]] = ([], [])
    for question in questions:
        best = index.top_k(question.text, engine.settings.top_k)
        # in the documents' own order, as a retriever's order would put the target at the same place every time
        chosen = sorted(best, key=lambda d: place[d.id])
        ranking = [chosen.index(d) for d in best]
        half = halves[place[best[0].id] % 2]
        if len(half) < prompts // 2:
            half.append(Sample(chosen, question.text, question.answers, ranking))
    if min(map(len, halves)) < LEAST_PROMPTS:
        rule = (
            f"at least {LEAST_PROMPTS} are needed about documents of each half (every second document is kept for the "
            f"report); these give {len(halves[0])} and {len(halves[1])}"
        )
        raise InputError("questions", rule, len(questions))
    return halves
