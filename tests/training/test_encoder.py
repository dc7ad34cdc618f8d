"""The encoder's student does what serving does, its gradients reach all that is trained, and training helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from kvquilt import Engine
from kvquilt.errors import InputError
from kvquilt.fidelity import compare, truth
from kvquilt.model.graph import Read, frozen
from kvquilt.model.parts import PLAIN
from kvquilt.placement import place_runs
from kvquilt.repair.presets import find_method
from kvquilt.training.encoder import EncoderShape, EncoderStudent
from kvquilt.training.exercise import Exercise
from kvquilt.training.lesson import Lesson, lesson
from kvquilt.training.objective import divergence
from kvquilt.training.teacher import Branches, Target, Teacher
from kvquilt.writers.encoder import make_encoder
from tests.engines import QUESTION, at_rest, documents, make_engine
from tests.models import tiny

TOKENS = 4
QUESTIONS = (QUESTION, "Where is it used?")
Taught = tuple[Lesson, list[Target], Branches]


def taught(engine: Engine, count: int = 3, hidden: bool = False) -> Taught:
    exercise = Exercise(tuple(documents(count, 60)), QUESTIONS)
    made = lesson("it", exercise, engine._template, engine.model.capability, TOKENS)
    targets = Teacher(TOKENS, 0, hidden).targets(engine.model, made)
    return made, targets, Branches.of(made.questions, [t.answer for t in targets])


def parameters(engine: Engine, every: int = 1, gates: float = 0.0) -> dict[str, torch.nn.Parameter]:
    named = EncoderShape(every).drawn(engine.model, 0)
    return {n: torch.nn.Parameter(t + gates if n.endswith("gate") else t) for n, t in named.items()}


def summed(read: Read, targets: list[Target], branches: Branches) -> torch.Tensor:
    return torch.stack([divergence(t, branches.answer_rows(read.logits, n)).sum() for n, t in enumerate(targets)]).sum()


def kl_of(
    engine: Engine, named: Mapping[str, torch.Tensor], given: Taught, every: int = 1, keep_all: bool = True
) -> torch.Tensor:
    """Per answer token, with gradients."""
    each, targets, branches = given
    with frozen(engine.model):
        student = EncoderStudent(engine.model, keep_all=keep_all)
        (read,) = student.read(EncoderShape(every).parts(named), [each], [branches])
        return summed(read, targets, branches) / sum(len(t.answer) for t in targets)


@pytest.mark.parametrize(("family", "every"), [("llama", 1), ("qwen3", 2), ("gemma3", 3), ("phi3-partial", 1)])
def test_the_student_reads_what_is_served(family: str, every: int) -> None:
    engine = make_engine(family)
    given, named = taught(engine), parameters(engine, every, gates=0.5)
    writer = make_encoder(engine.model.fingerprint, named, every)
    engine.reader = replace(engine.reader, trained={"encoder": writer})
    student = EncoderStudent(engine.model)
    with torch.no_grad():
        (read,) = student.read(EncoderShape(every).parts(named), [given[0]], [given[2]], orders=[[2, 0, 1]])
    for n, question in enumerate(QUESTIONS):
        placement = place_runs(engine.prompt(question, documents(3, 60)).runs(engine.model.tokenizer))
        true = truth(engine, placement, None, TOKENS)
        assert true.ids == given[1][n].answer
        served = compare(engine, placement, find_method("none:writer=encoder"), None, true)
        mine = divergence(given[1][n], given[2].answer_rows(read.logits, n))
        assert torch.allclose(served.kl, mine, atol=1e-4)
    engine.close()
    at_rest(engine)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_reach_all_that_is_trained_and_nothing_else(family: str) -> None:
    engine = make_engine(family)
    before = {n: p.detach().clone() for n, p in engine.model.hf.named_parameters()}
    given = taught(engine)
    closed = parameters(engine)
    kl_of(engine, closed, given).backward()
    moved = {n for n, p in closed.items() if p.grad is not None and float(p.grad.abs().max()) > 0}
    assert moved == {n for n in closed if n.endswith("gate")}, "closed gates let nothing through"
    opened = parameters(engine, gates=0.3)
    kl_of(engine, opened, given).backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in opened.values())
    for name, p in engine.model.hf.named_parameters():
        assert p.grad is None
        assert p.requires_grad
        assert torch.equal(p, before[name])
    at_rest(engine)


def test_checkpointed_gradients_are_the_direct_ones_also_lesson_by_lesson() -> None:
    engine = make_engine()
    many = [taught(engine, 3), taught(engine, 2)]
    lessons, branches = [each for each, _, _ in many], [b for _, _, b in many]
    shape, found = EncoderShape(2), []
    for keep_all in (True, False):
        for apart in (True, False):
            named = parameters(engine, 2, gates=0.3)
            student = EncoderStudent(engine.model, keep_all=keep_all)

            def loss(n: int, read: Read) -> torch.Tensor:
                return summed(read, many[n][1], many[n][2])

            with frozen(engine.model):
                if apart:
                    student.learn(shape.parts(named), lessons, branches, loss)
                else:
                    reads = student.read(shape.parts(named), lessons, branches)
                    torch.stack([loss(n, read) for n, read in enumerate(reads)]).sum().backward()
            found.append({n: p.grad for n, p in named.items()})
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert gradient is not None
            assert other[name] is not None
            assert torch.allclose(gradient, other[name], rtol=1e-3, atol=1e-5 * float(gradient.abs().max())), name


def test_it_begins_as_the_model_without_documents_and_learns() -> None:
    engine = make_engine()
    given, named = taught(engine, hidden=True), parameters(engine)
    start = float(kl_of(engine, named, given).detach())
    other = taught(engine, 2)
    assert start == pytest.approx(
        float(kl_of(engine, parameters(engine), (replace(given[0], documents=other[0].documents), *given[1:])).detach())
    )
    optimizer = torch.optim.AdamW(named.values(), lr=3e-3, weight_decay=0.0)
    for _ in range(40):
        kl_of(engine, named, given).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(kl_of(engine, named, given).detach()) < start / 5


def test_hidden_states_are_those_of_the_questions_rows() -> None:
    engine = make_engine()
    each, _, branches = taught(engine)
    parts = EncoderShape(1).parts(parameters(engine, gates=0.3))
    (read,) = EncoderStudent(engine.model).read(parts, [each], [branches], hidden=True)
    assert len(read.hidden) == engine.model.capability.layers
    assert [len(rows) for rows in read.hidden[0]] == [branches.common + n for n in branches.lengths]


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(InputError, match="every"):
        EncoderShape(0)
    with pytest.raises(InputError, match="at most the 3 layers"):
        EncoderShape(4).drawn(tiny("llama"), 0)
    engine = make_engine()
    each, _, branches = taught(engine)
    with pytest.raises(InputError, match="cross layers"):
        EncoderStudent(engine.model).read(PLAIN, [each], [branches])


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    shape, model = EncoderShape(1), tiny("llama")
    one, two = shape.drawn(model, 3), shape.drawn(model, 3)
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert not torch.equal(one["cross.0.q_proj"], shape.drawn(model, 4)["cross.0.q_proj"])
    assert {shape.kind_of(name) for name in one} == set(shape.kinds)
    for name, p in model.hf.base_model.layers[0].named_parameters():
        assert torch.equal(one[f"encoder.0.{name}"], p)
        assert one[f"encoder.0.{name}"].data_ptr() != p.data_ptr()
