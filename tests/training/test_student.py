"""The student is what serving does, and what one pass under the block mask gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from kvquilt.model.graph import Read, frozen
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.parts import Adapter, Parts, embedded, parts_of
from kvquilt.repair.presets import find_method
from kvquilt.training.lesson import Lesson
from kvquilt.training.student import Student
from kvquilt.training.teacher import Branches
from kvquilt.writers.artefact import make_writer
from tests.engines import at_rest, make_engine
from tests.models import build, tiny
from tests.training.steps import Taught, answers, served
from tests.writers.trained import SHAPES, random_parts

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
ALPHA = 4.0
ANSWERS = ((5, 6, 7), (8,), (9, 10))


def drawn(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(4, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def lesson(seed: int = 0) -> Lesson:
    """Questions that begin alike, one of them within another; a document longer than a window and than a block."""
    asked = drawn(9, seed + 9)
    documents = tuple(drawn(n, seed + n) for n in (7, 70, 12))
    return Lesson("x", drawn(5, seed), documents, (asked, (*asked[:4], *drawn(3, seed + 1)), asked[:6]))


def student_of(model: LanguageModel, kind: str, prefix: tuple[int, ...] = (), keep_all: bool = False) -> Student:
    _, header, trailer = SHAPES[kind]
    return Student(model, header, trailer, prefix, keep_all)


def in_one_pass(
    family: str, parts: Parts, packets: Sequence[tuple[int, ...]], each: Lesson, branch: int
) -> torch.Tensor:
    """``[T, vocabulary]`` of the stock model under a 4-D mask, its adapter at the documents' rows alone."""
    hf = build(family)
    hf.set_attn_implementation("eager")
    ids = torch.tensor(
        [*each.opening, *(i for p in packets for i in p), *each.questions[branch], *ANSWERS[branch][:-1]]
    )
    of = [-1] * len(each.opening) + [n for n, p in enumerate(packets) for _ in p]
    of += [-2] * (len(ids) - len(of))  # of the question, which sees everything
    row, at = torch.tensor(of)[:, None], torch.arange(len(ids))
    seen = (at <= at[:, None]) & ((row == row.T) | (row == -2))
    masks = {}
    for name, window in (
        ("full_attention", None),
        ("sliding_attention", hf.config.get_text_config().sliding_window if "gemma" in family else None),
    ):
        within = seen if window is None else seen & (at[:, None] - at < window)
        masks[name] = torch.zeros(within.shape).masked_fill(~within, torch.finfo(torch.float32).min)[None, None]
    written = (row >= 0).float()

    def add(
        a: torch.Tensor, b: torch.Tensor, scaling: float, _: Any, args: tuple[torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        return out + written * scaling * linear(linear(args[0], a), b)

    if isinstance(parts.adapter, Adapter):
        for name, (a, b) in parts.adapter.pairs.items():
            hf.base_model.get_submodule(name).register_forward_hook(partial(add, a, b, parts.adapter.scaling))
    mask: Any = masks if "gemma" in family else masks["full_attention"]
    entering = embedded(hf.get_input_embeddings(), ids, parts.soft)[None]
    out = hf(inputs_embeds=entering, position_ids=at[None], attention_mask=mask, use_cache=False)
    logits: torch.Tensor = out.logits[0, -len(ANSWERS[branch]) :]
    return logits


def summed(branches: Branches, reads: Sequence[Read]) -> torch.Tensor:
    """Something that looks at every logit, and at every hidden state if there are any, differently."""
    draw, total = torch.Generator().manual_seed(1), torch.zeros(())
    for read in reads:
        looked = [branches.answer_rows(read.logits, n) for n in range(len(ANSWERS))]
        looked += [rows for layer in read.hidden[:-1] for rows in layer]
        for t in looked:
            total = total + (t * torch.randn(t.shape, generator=draw)).sum()
    return total


@pytest.mark.parametrize("kind", sorted(SHAPES))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_student_is_one_pass_under_the_block_mask_gradients_too(family: str, kind: str) -> None:
    model, each = tiny(family), lesson()
    named = {name: torch.nn.Parameter(t) for name, t in random_parts(model, *SHAPES[kind]).items()}
    student, branches = student_of(model, kind), Branches.of(each.questions, ANSWERS)
    packets = [student.packet(ids) for ids in each.documents]
    with frozen(model):
        (read,) = student.read(parts_of(named, ALPHA), [each], [branches])
        summed(branches, [read]).backward()
    found = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    for p in named.values():
        p.grad = None
    wanted = [in_one_pass(family, parts_of(named, ALPHA), packets, each, n) for n in range(len(ANSWERS))]
    for n, logits in enumerate(wanted):
        assert torch.allclose(branches.answer_rows(read.logits, n), logits, atol=1e-3)
    whole = Read(torch.cat(wanted)[None], [])
    summed(branches, [whole]).backward()
    for name, gradient in found.items():
        truth = named[name].grad
        assert truth is not None
        assert float((gradient - truth).norm()) <= 1e-3 * float(truth.norm())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", sorted(SHAPES))
@pytest.mark.parametrize("family", [*FAMILIES, "mistral-window"])
def test_the_student_answers_as_serving_does(family: str, kind: str, shared: bool) -> None:
    engine = make_engine(family, shared_prefix=shared)
    model, prefix = engine.model, engine._template.opening if shared else ()
    named, known = random_parts(model, *SHAPES[kind]), Taught.by(model, engine._template, count=1)
    reads = student_of(model, kind, prefix).read(parts_of(named, ALPHA), known.lessons, known.branches)
    writer = make_writer(kind, model.fingerprint, named, ALPHA, prefix, model.name)
    engine.reader = replace(engine.reader, trained={kind: writer})
    found = served(engine, known, find_method(kind))
    assert answers(known, reads) == pytest.approx(found, abs=1e-3)
    assert found != pytest.approx(served(engine, known, find_method("none")), abs=1e-2)
    at_rest(engine)


@pytest.mark.parametrize("prefix", [(), (20, 21, 22)])
@pytest.mark.parametrize("kind", sorted(SHAPES))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_learning_gives_the_gradients_of_one_direct_backward(family: str, kind: str, prefix: tuple[int, ...]) -> None:
    model, lessons = tiny(family), [lesson(), lesson(50)]
    named = {name: torch.nn.Parameter(t) for name, t in random_parts(model, *SHAPES[kind]).items()}
    branches, orders = [Branches.of(each.questions, ANSWERS) for each in lessons], [[2, 0, 1], [0, 1, 2]]
    direct, least = student_of(model, kind, prefix, keep_all=True), student_of(model, kind, prefix)
    with frozen(model):
        reads = direct.read(parts_of(named, ALPHA), lessons, branches, True, orders)
        (summed(branches[0], reads[:1]) + summed(branches[1], reads[1:])).backward()
        wanted = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        for p in named.values():
            p.grad = None
        least.learn(
            parts_of(named, ALPHA), lessons, branches, lambda n, read: summed(branches[n], [read]), True, orders
        )
    for name, gradient in wanted.items():
        found = named[name].grad
        assert found is not None
        assert float((found - gradient).norm()) <= 1e-4 * float(gradient.norm())


def test_lessons_and_questions_do_not_touch_each_other() -> None:
    model, first, second = tiny(), lesson(), lesson(50)
    parts = parts_of(random_parts(model, *SHAPES["joint"]), ALPHA)
    both = student_of(model, "joint").read(
        parts, [first, second], [Branches.of(e.questions, ANSWERS) for e in (first, second)]
    )
    branches = Branches.of(first.questions, ANSWERS)
    for n in range(len(ANSWERS)):
        single = Branches.of(first.questions[n : n + 1], ANSWERS[n : n + 1])
        (alone,) = student_of(model, "joint").read(parts, [first], [single])
        assert torch.allclose(branches.answer_rows(both[0].logits, n), single.answer_rows(alone.logits, 0), atol=1e-4)


def test_a_loss_that_raises_leaves_no_gradient() -> None:
    model, each = tiny(), lesson()
    named = {name: torch.nn.Parameter(t) for name, t in random_parts(model, *SHAPES["joint"]).items()}
    branches = Branches.of(each.questions, ANSWERS)

    def loss(n: int, read: Read) -> torch.Tensor:
        if n:
            raise KeyError("second")
        return summed(branches, [read])

    with pytest.raises(KeyError, match="second"), frozen(model):
        student_of(model, "joint").learn(parts_of(named, ALPHA), [each, each], [branches, branches], loss)
    assert all(p.grad is None for p in named.values())
