"""Three kinds of documents, each to train and to measure on: invented people, encyclopedia, Python's own help."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvquilt.engine import SYSTEM
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.biography import BiographyTask
from kvquilt.evaluation.tasks.help_topics import HelpTopics
from kvquilt.evaluation.tasks.hotpotqa import HotpotQA
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.metrics import bare, bare_value
from kvquilt.model.language_model import LanguageModel
from kvquilt.template import PromptTemplate
from kvquilt.tokens import encoder
from kvquilt.training.asking import Asker
from kvquilt.training.data import Sets, asked_data
from kvquilt.training.exercise import Exercise
from kvquilt.training.lesson import lesson

DOCUMENTS = 4  # in a set
_QUESTIONS = 4  # about a set to train on
_CUT = 112  # tokens of a HotpotQA paragraph; biographies and passages of help are about as long by themselves
_ROOM = 128  # tokens for soft tokens and an answer


@dataclass(frozen=True, eq=False, slots=True)
class Domain:
    """What is trained on and what is measured on.

    Attributes:
        form: what of a prediction is scored; see `bag_counts`.
        items: of one question each.
        answers: right ones by item; none where nobody knows.

    Raises:
        InputError: a document is in both parts.
    """

    name: str
    system: str
    form: Callable[[str], str]
    train: Sequence[Exercise]
    items: Sequence[Exercise]
    answers: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        trained, held = ({d.text for each in part for d in each.documents} for part in (self.train, self.items))
        if shared := trained & held:
            raise InputError(self.name, "no document may be in training and evaluation", f"{len(shared)} are")


def biography(sets: int, items: int, seed: int, among: int) -> Domain:
    """Items are about `among` people: documents come up again, as in use, and are compiled once."""
    task = BiographyTask()
    train = task.exercises("train", sets, DOCUMENTS, _QUESTIONS, seed)
    return _gold("biography", task.system, bare_value, train, task.items("test", items, DOCUMENTS, seed, among))


def hotpotqa(model: LanguageModel, train: Path, held: Path, sets: int, items: int, seed: int) -> Domain:
    """Samples of `train` that share a paragraph with one of `held` are left out.

    Raises:
        InputError: too few samples.
    """
    evaluated = HotpotQA.read(held)
    apart = HotpotQA.read(train).apart_from(evaluated)
    for name, wanted, there in (("sets", sets, apart.samples), ("items", items, evaluated.samples)):
        if wanted > len(there):
            raise InputError(name, f"HotpotQA has {len(there)} of them", wanted)
    encode = encoder(model.tokenizer).encode

    def length(text: str) -> int:
        return len(encode(text))

    lessons = apart.exercises(sets, DOCUMENTS, seed, limit=_CUT, length=length)
    asked = evaluated.items(items, DOCUMENTS, seed, limit=_CUT, length=length)
    return _gold("hotpotqa", HotpotQA.SYSTEM, bare, lessons, asked)


def help_topics(
    model: LanguageModel, questions: Path, sets: int, items: int, seed: int, among: int, passages: int
) -> Domain:
    """The model asks, about `passages` to train on and `among` to measure on; `questions` is where that is kept."""
    template, draw = PromptTemplate(model.tokenizer, SYSTEM), random.Random(f"help {seed}")
    asker = Asker(model, template, _QUESTIONS, seed, questions)

    def check(exercise: Exercise) -> None:
        lesson("a set", exercise, template, model.capability, _ROOM)

    def made(split: str, size: int, count: int, asked: int) -> tuple[Exercise, ...]:
        def progress(n: int, of: int) -> None:
            if n % 16 == 0:
                print(f"help, {split}: asked about {n} of {of} passages", flush=True)

        pool = draw.sample(HelpTopics().documents(split), size)
        wanted = Sets((DOCUMENTS,), asked, count, held_out=0.0, seed=seed)
        return asked_data(pool, [], wanted, asker, check, progress).exercises

    return Domain("help", SYSTEM, bare, made("train", passages, sets, _QUESTIONS), made("test", among, items, 1))


def _gold(
    name: str, system: str, form: Callable[[str], str], train: Sequence[Exercise], items: Sequence[Item]
) -> Domain:
    asked = [Exercise(item.documents, (item.question,)) for item in items]
    return Domain(name, system, form, train, asked, [item.answers for item in items])
