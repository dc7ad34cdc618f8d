"""Memory of long dialogues, from a file of LoCoMo's form (Maharana et al., 2024): sittings or turns are the documents.

The data are CC BY-NC 4.0 and no part of this project; the caller names a file.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.checks import check_count, check_name
from kvquilt.evaluation.tasks.grading import Metric
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.leakage import check_documents_apart, known
from kvquilt.evaluation.tasks.rows import check_rows, one_row, read_rows, text_of
from kvquilt.evaluation.tasks.splits import SPLITS, Divided, check_asked, in_turns
from kvquilt.retrieval import Index

_FORM = "must be a list of LoCoMo's dialogues (sample_id, conversation, qa [question, answer, evidence, category])"
_UNANSWERABLE = 5  # the category: a broken cache says "not mentioned" too, and would get credit
_TURN = re.compile(r"D:?(\d+):0*(\d+)")  # as ``D3:7``; ``D:3:7`` and ``D3:07`` are slips of the pen
_SITTING = re.compile(r"session_(\d+)")

Place = tuple[int, int]  # a turn: number of the sitting, number within


class Retriever(Protocol):
    """What searches one dialogue."""

    def top_k(self, question: str, k: int) -> Sequence[Document]:
        """The best `k` of its documents, or all."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    id: str
    text: str = field(repr=False)
    answer: str = field(repr=False)
    evidence: frozenset[Place]
    category: int


@dataclass(frozen=True, slots=True)
class Dialogue:
    """`sittings`: number -> date; `turns`: in their order, each as a line of text."""

    id: str
    sittings: dict[int, str]
    turns: dict[Place, str] = field(repr=False)
    questions: tuple[Question, ...] = field(repr=False)

    def documents(self, unit: str) -> list[tuple[Document, frozenset[Place]]]:
        """Every sitting, or every turn, behind its date, and which turns it holds; first to last."""
        made = []
        for number, date in self.sittings.items():
            own = {place: text for place, text in self.turns.items() if place[0] == number}
            parts = [own] if unit == "sitting" else [{place: text} for place, text in own.items()]
            for part in parts:
                end = "" if unit == "sitting" else f":{next(iter(part))[1]}"
                document = Document("\n".join([date, *part.values()]), id=f"{self.id}-{number}{end}")
                made.append((document, frozenset(part)))
        return made


@dataclass(frozen=True, slots=True)
class DialogueTask:
    """Questions about dialogues: the first four tenths tune, the others evaluate. Group is the dialogue, kind the
    file's category of the question.

    Documents stand in the order of the dialogue, since much is asked about time. Dialogues take turns.

    Attributes:
        path: the file, or a data set (see `read_rows`).
        tuning: the file that tunes; without one, the first `share` of `path`'s dialogues do.
        form: ``retrieved``: what `retriever` finds for the question, with its scores, of which gold may be a part or
            nothing; or ``evidence``: what the answer rests on, and others of the dialogue, drawn.
        unit: a document is a sitting, or a turn, each behind its date.
        documents: how many an item has; in the form ``evidence`` more where the evidence is more.
        sha256: what the digest of `path` must be.
        retriever: made of the documents of a dialogue, once; BM25 by default.
        dialogues: what was read.
        skipped: questions left out, and evidence that names no turn and is passed over, by the reason.

    Raises:
        InputError: a file that cannot be read or has another form, a setting out of its range.
        LeakageError: a sitting would tune and evaluate.
    """

    path: str | Path
    tuning: str | Path = ""
    share: float = 0.4
    form: Literal["retrieved", "evidence"] = "retrieved"
    unit: Literal["sitting", "turn"] = "sitting"
    documents: int = 5
    sha256: str = ""
    retriever: Callable[[Sequence[Document]], Retriever] = Index
    dialogues: Divided[Dialogue] = field(init=False, repr=False, compare=False)
    skipped: dict[str, int] = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "dialogue"
    system: ClassVar[str] = (
        "Answer the question from the conversations. Give the answer only, in as few words as possible: no sentence."
    )
    metric: ClassVar[Metric] = Metric("squad_f1", right=0.5)
    answer_limit: ClassVar[int] = 32
    splits: ClassVar[tuple[str, ...]] = SPLITS
    extractive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_name("form", self.form, ("retrieved", "evidence"))
        check_name("unit", self.unit, ("sitting", "turn"))
        check_count("documents", self.documents, 1)
        skipped: Counter[str] = Counter()
        read = _dialogues(self.path, self.sha256, skipped)
        tuning = _dialogues(self.tuning, "", skipped) if self.tuning else None
        dialogues = Divided.of(read, self.share, tuning)
        tuned, evaluation = (
            [document for dialogue in some for document, _ in dialogue.documents("sitting")]
            for some in (dialogues.tuning, dialogues.evaluation)
        )
        check_documents_apart("tuning", tuned, known(evaluation))
        object.__setattr__(self, "dialogues", dialogues)
        object.__setattr__(self, "skipped", dict(skipped))

    def items(self, split: str, count: int | None = None, *, seed: int = 0) -> list[Item]:
        """As every task's; `Item.gold` of the form ``retrieved`` is the evidence that was found, maybe none."""
        check_asked(count)
        opened = [self._opened(dialogue) for dialogue in self.dialogues.split(split)]
        asked = in_turns([[(each, question) for question in each[0].questions] for each in opened])
        return [self._item(*each, question, seed) for each, question in asked[:count]]

    def _opened(self, dialogue: Dialogue) -> tuple[Dialogue, list[tuple[Document, frozenset[Place]]], Retriever | None]:
        documents = dialogue.documents(self.unit)
        return dialogue, documents, self.retriever([d for d, _ in documents]) if self.form == "retrieved" else None

    def _item(
        self,
        dialogue: Dialogue,
        documents: list[tuple[Document, frozenset[Place]]],
        retriever: Retriever | None,
        question: Question,
        seed: int,
    ) -> Item:
        gold = {d.id for d, turns in documents if not turns.isdisjoint(question.evidence)}
        if retriever is not None:
            chosen = {document.id: document for document in retriever.top_k(question.text, self.documents)}
        else:
            draw = random.Random(f"dialogue {seed} {question.id}")
            others = [d for d, _ in documents if d.id not in gold]
            spare = min(len(others), max(0, self.documents - len(gold)))
            chosen = {d.id: d for d in (*draw.sample(others, spare), *(d for d, _ in documents if d.id in gold))}
        ordered = tuple(chosen[d.id] for d, _ in documents if d.id in chosen)
        places = tuple(n for n, document in enumerate(ordered) if document.id in gold)
        kind = f"category {question.category}"
        return Item(question.id, ordered, question.text, (question.answer,), places, dialogue.id, self.name, kind)


def _dialogues(path: str | Path, sha256: str, skipped: Counter[str]) -> list[Dialogue]:
    made = []
    for index, row in enumerate(check_rows(read_rows(path, _FORM, sha256), _FORM)):
        with one_row(f"path[{index}]", _FORM):
            name = text_of(row["sample_id"], "sample_id")
            sittings = dict(_sittings(row["conversation"]))
            turns = {place: line for number in sittings for place, line in _turns(row["conversation"], number)}
            questions = tuple(_questions(name, row["qa"], turns, skipped))
        if not questions:
            raise InputError(f"path[{index}]", "must ask something that can be answered", name)
        made.append(Dialogue(name, sittings, turns, questions))
    if len({dialogue.id for dialogue in made}) < len(made):
        raise InputError("path", "ids must tell dialogues apart: a sample_id comes up twice")
    return made


def _sittings(conversation: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Number and date of those that have turns; the file has dates of others, too."""
    numbers = [int(found[1]) for key in conversation if (found := _SITTING.fullmatch(key)) and conversation[key]]
    for number in sorted(numbers):
        date = f"session_{number}_date_time"
        yield number, text_of(conversation[date], date).strip()


def _turns(conversation: dict[str, Any], number: int) -> Iterator[tuple[Place, str]]:
    for turn in conversation[f"session_{number}"]:
        found = _TURN.fullmatch(text_of(turn["dia_id"], "dia_id").strip())
        if found is None:
            raise ValueError(turn["dia_id"])
        shown = text_of(turn.get("blip_caption") or "", "blip_caption").strip()
        caption = f" [{shown}]" if turn.get("blip_caption") else ""
        said = " ".join(text_of(turn["text"], "text").split())
        yield (int(found[1]), int(found[2])), f"{text_of(turn['speaker'], 'speaker')}: {said}{caption}"


def _questions(
    name: str, rows: list[dict[str, Any]], turns: dict[Place, str], skipped: Counter[str]
) -> Iterator[Question]:
    for index, row in enumerate(rows):
        if row["category"] == _UNANSWERABLE:
            skipped["unanswerable"] += 1
            continue
        named = [_TURN.findall(text_of(each, "evidence")) for each in row["evidence"]]
        skipped["evidence that names no turn"] += named.count([])
        evidence = frozenset((int(sitting), int(turn)) for each in named for sitting, turn in each)
        if not evidence:
            skipped["no evidence"] += 1
        elif not evidence <= turns.keys():
            skipped["evidence that is not in the dialogue"] += 1
        else:
            asked, answer = text_of(row["question"], "question").strip(), text_of(str(row["answer"]), "answer").strip()
            yield Question(f"{name}-{index}", asked, answer, evidence, int(row["category"]))
