from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.model.graph import frozen
from kvquilt.repair.presets import find_method
from kvquilt.training.link_tokens import LinkShape, LinkStudent
from kvquilt.writers.link_tokens import LinkTokens
from tests.engines import at_rest, make_engine
from tests.models import tiny
from tests.training.steps import Taught, answers, parameters, served, train

pytestmark = pytest.mark.usefixtures("nan_slots")


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-window", "phi3-partial"])
@pytest.mark.parametrize("sets", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_the_student_answers_as_serving_does(family: str, sets: int, shared: bool) -> None:
    engine = make_engine(family, shared_prefix=shared)
    model, prefix = engine.model, engine._template.opening if shared else ()
    lent = model.pool.lent
    shape = LinkShape(2, sets)
    named = shape.drawn(model, 0)
    known = Taught.by(model, engine._template, count=1)
    student = LinkStudent(model, shape, prefix)
    reads = student.read(shape.parts(named), known.lessons, known.branches)
    links = LinkTokens.of(model.fingerprint, named["links"], prefix)
    engine.reader = replace(engine.reader, trained={"link-tokens": links})
    found = served(engine, known, replace(find_method("none"), writer="link-tokens"))
    assert answers(known, reads) == pytest.approx(found, abs=1e-3)
    assert found != pytest.approx(served(engine, known, find_method("none")), abs=1e-3)
    at_rest(engine, lent=lent)


def test_only_the_links_have_gradients_and_learning_gives_those_of_one_backward() -> None:
    model, shape = tiny(), LinkShape(3)
    engine, lent = make_engine(model), model.pool.lent
    known, named = Taught.by(model, engine._template), parameters(shape.drawn(model, 0))
    student = LinkStudent(model, shape)
    with frozen(model):
        student.learn(shape.parts(named), known.lessons, known.branches, known.kl)
        at_once, named["links"].grad = named["links"].grad, None
        reads = student.read(shape.parts(named), known.lessons, known.branches)
        torch.stack([known.kl(n, read) for n, read in enumerate(reads)]).sum().backward()
    assert at_once is not None
    assert float(at_once.abs().amax(-1).min()) > 0
    assert named["links"].grad is not None
    assert torch.allclose(at_once, named["links"].grad, rtol=1e-4, atol=1e-7)
    assert all(p.grad is None and p.requires_grad for p in model.hf.parameters())
    at_rest(engine, lent=lent)


def test_documents_may_stand_in_another_order_and_hidden_states_are_the_questions_alone() -> None:
    model, shape = tiny(), LinkShape(2, 3)
    known = Taught.by(model, make_engine(model)._template, count=1)
    parts, student = shape.parts(shape.drawn(model, 0)), LinkStudent(model, shape)
    [each] = known.lessons
    turned = replace(each, documents=(each.documents[2], each.documents[0], each.documents[1]))
    [one] = student.read(parts, [each], known.branches, True, [[2, 0, 1]])
    [other] = student.read(parts, [turned], known.branches)
    assert torch.equal(one.logits, other.logits)
    [branches] = known.branches
    assert [len(branch) for branch in one.hidden[0]] == [branches.common + n for n in branches.lengths]


def test_a_few_steps_bring_the_answers_nearer() -> None:
    model, shape = tiny(), LinkShape(4)
    known = Taught.by(model, make_engine(model)._template)
    student, named = LinkStudent(model, shape), parameters(shape.drawn(model, 0))
    before = known.total(student.read(shape.parts(named), known.lessons, known.branches))
    train(model, student, shape, named, known, 2e-2, 40)
    after = known.total(student.read(shape.parts(named), known.lessons, known.branches))
    assert after < 0.6 * before


def test_more_documents_than_places_are_refused() -> None:
    model, shape = tiny(), LinkShape(2, 2)
    known = Taught.by(model, make_engine(model)._template, count=1)
    with pytest.raises(InputError, match="at most 2"):
        LinkStudent(model, shape).read(shape.parts(shape.drawn(model, 0)), known.lessons, known.branches)
    with pytest.raises(InputError, match="at least 1"):
        LinkShape(0)
