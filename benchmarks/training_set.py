"""What the training benchmarks measure on: biographies, with a teacher whose answers are drawn instead of asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvquilt.evaluation.tasks.biography import SYSTEM, BiographyTask
from kvquilt.model.graph import Read, frozen
from kvquilt.model.language_model import LanguageModel
from kvquilt.template import PromptTemplate
from kvquilt.training.components import Components
from kvquilt.training.lesson import Lesson, lesson
from kvquilt.training.objective import divergence, state_error
from kvquilt.training.student import Student
from kvquilt.training.teacher import Branches, Target

_ANSWER = (3, 4, 5, 8)  # tokens of a biography's answer, the end token included
_TOP = 64


def lessons_of(model: LanguageModel, count: int, questions: int, documents: int = 5) -> list[Lesson]:
    template = PromptTemplate(model.tokenizer, SYSTEM)
    made = BiographyTask().exercises("train", count, documents=documents, questions=questions)
    return [lesson(f"exercise {n}", each, template, model.capability, 32) for n, each in enumerate(made)]


def drawn_targets(model: LanguageModel, lessons: Sequence[Lesson]) -> list[list[Target]]:
    """As large as a teacher's, at random."""
    lengths, draw = random.Random(0), torch.Generator().manual_seed(0)
    config = model.hf.config.get_text_config()
    shape = (model.capability.layers - 1, config.hidden_size)

    def one(question: tuple[int, ...]) -> Target:
        tokens = lengths.choice(_ANSWER)
        log_probs, top = torch.randn(tokens, config.vocab_size, generator=draw).log_softmax(-1).topk(_TOP)
        rest = (1 - log_probs.exp().sum(-1)).log()
        answer = tuple(torch.randint(0, config.vocab_size, (tokens,), generator=draw).tolist())
        rows = len(question) + tokens - 1
        hidden = torch.randn(shape[0], rows, shape[1], generator=draw).to(torch.bfloat16)
        return Target(answer, top.int(), log_probs, rest, hidden)

    return [[one(question) for question in each.questions] for each in lessons]


def loss_of(read: Read, branches: Branches, targets: Sequence[Target]) -> torch.Tensor:
    """KL and dense objective of one lesson."""
    total = torch.zeros((), device=read.logits.device)
    for n, target in enumerate(targets):
        total = total + divergence(target, branches.answer_rows(read.logits, n)).sum()
        if target.hidden is not None and read.hidden:
            total = total + 10 * state_error(target.hidden, read.hidden, n)
    return total


def warm(model: LanguageModel, student: Student, components: Components) -> None:
    """Touch every weight and run every kernel once, on few tokens."""
    each = lessons_of(model, 1, 1)[0]
    short = replace(each, documents=(each.documents[0][:8],))
    targets = drawn_targets(model, [short])[0]
    branches = Branches.of(short.questions, [t.answer for t in targets])
    with frozen(model):
        student.learn(components.parts(), [short], [branches], lambda _, read: loss_of(read, branches, targets), True)
    for p in components.trained.values():
        p.grad = None
