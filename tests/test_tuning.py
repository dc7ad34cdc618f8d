"""Tuning: chooses on one half, reports on the other, stores what holds there, and `auto` obeys it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvquilt import Document, Engine
from kvquilt.errors import InputError, StoreUnavailableError
from kvquilt.identity import namespace
from kvquilt.repair.presets import find_method
from kvquilt.retrieval import top_k
from kvquilt.store import Failure, FailureReason, Store
from kvquilt.tuning import candidates, note_name
from kvquilt.tuning_plot import plot
from kvquilt.tuning_report import Trial, TuneReport
from kvquilt.tuning_samples import Question, halved_samples, read_questions
from tests.engines import QUESTION, documents, make_engine
from tests.models import tiny
from tests.writers.trained import random_encoder, random_writer

METHODS = ("none", "epic:k=4", "spread:30%", "random:100%")


@pytest.fixture(scope="module")
def tuned() -> Iterator[tuple[Engine, TuneReport]]:
    with make_engine() as engine:
        yield engine, engine.tune(documents(6), target=0.999, methods=METHODS, prompts=8)


def test_the_cheapest_that_reaches_the_target_is_chosen(tuned: tuple[Engine, TuneReport]) -> None:
    _, report = tuned
    trials = {t.method: t for t in report.trials}
    assert set(trials) == set(METHODS)
    assert [t.charged for t in report.trials] == sorted(t.charged for t in report.trials)
    assert trials["random:100%"].fidelity == pytest.approx(1.0, abs=1e-4), "all rows are full prefill"
    assert trials["none"].quality < 0.999, "reuse changes a random model's answers, or nothing was tested"
    assert report.chosen is not None
    chosen = trials[report.chosen]
    assert chosen.quality >= report.target
    assert not [t for t in report.trials if t.quality >= report.target and t.charged < chosen.charged]


def test_the_choice_is_reported_on_prompts_it_was_not_made_on(tuned: tuple[Engine, TuneReport]) -> None:
    engine, report = tuned
    assert report.held_out is not None
    assert report.held_out.method == report.chosen
    choose, hold = halved_samples(engine, documents(6), (), 8, None)
    assert choose
    assert hold
    targets = [{s.documents[s.ranking[0]].id for s in half} for half in (choose, hold)]
    assert not targets[0] & targets[1]
    assert not {s.question for s in choose} & {s.question for s in hold}


def test_auto_uses_what_was_tuned_and_says_so(tuned: tuple[Engine, TuneReport]) -> None:
    engine, report = tuned
    ledger = engine.ask(QUESTION, documents(3), method="auto").ledger
    assert report.accepted
    assert ledger.method == report.chosen
    assert "tuned for 0.999" in ledger.gate
    other = engine.ask(QUESTION, documents(3), method="auto", tenant="other").ledger
    assert other.method == "full", "one tenant's choice is not another's"


def test_the_report_is_stored_and_survives_json(tmp_path: Path) -> None:
    with make_engine(directory=tmp_path) as engine:
        report = engine.tune(documents(6), target=0.9, methods=("none", "random:100%"), prompts=6)
        name = note_name(engine)
    with make_engine(directory=tmp_path) as again:
        assert again.tuned() == report == TuneReport.from_dict(json.loads(json.dumps(report.as_dict())))
        assert again.tuned("other") is None
    written = report.as_dict()
    other = {"target": "0.9"}, {"held_out": {**written["held_out"], "quality": None}}, {"chosen": 3}, {"trials": 3}
    for note in ({"model": "of another version"}, *({**written, **change} for change in other)):
        with make_engine(directory=tmp_path) as foreign:
            foreign.store.write_note(namespace(None), name, note)
            assert foreign.tuned() is None


def test_a_forgotten_choice_is_gone_from_engine_and_store_for_its_tenant_alone(tmp_path: Path) -> None:
    few = {"target": 0.001, "methods": ("none",), "prompts": 6}
    with make_engine(directory=tmp_path) as engine:
        for tenant in (None, "other"):
            assert engine.tune(documents(6), tenant=tenant, **few).accepted
        assert engine.ask(QUESTION, documents(2)).ledger.method == "none"
        assert engine.forget_tuning() is True
        assert engine.forget_tuning() is False
        assert engine.tuned() is None
        assert engine.ask(QUESTION, documents(2)).ledger.method == "full"
        assert engine.ask(QUESTION, documents(2), tenant="other").ledger.method == "none"
    with make_engine(directory=tmp_path) as again:
        assert again.tuned() is None
        assert again.tuned("other") is not None


def test_a_choice_that_cannot_be_removed_is_forgotten_here_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(directory=tmp_path) as engine:
        engine.tune(documents(6), target=0.001, methods=("none",), prompts=6)
        monkeypatch.setattr(Store, "forget_note", lambda *_: Failure(FailureReason.READ_ONLY))
        with pytest.raises(StoreUnavailableError, match="read_only"):
            engine.forget_tuning()


def test_what_does_not_hold_on_the_other_half_is_not_used() -> None:
    trial = Trial("none", 0.99, 0.99, None, 0.001, 0.01, 1.0, 0.0, 5.0, 4)
    worse = Trial("none", 0.90, 0.90, None, 0.01, 0.1, 1.0, 0.0, 5.0, 4)
    report = TuneReport("m", "f", "w", 0.98, "fidelity", (trial,), "none", worse, 1.0)
    assert not report.accepted
    with make_engine() as engine:
        engine._measured.keep(None, report)
        assert engine.ask(QUESTION, documents(2), method="auto").ledger.method == "full"


def test_a_budget_that_a_short_prompt_cannot_pay_ends_in_full_prefill_under_auto() -> None:
    with make_engine() as engine:
        held = Trial("cacheblend:1%", 1.0, 1.0, None, 0.0, 0.0, 1.0, 0.1, 2.0, 4)
        engine._measured.keep(None, TuneReport("m", "f", "w", 0.9, "fidelity", (held,), held.method, held, 1.0))
        ledger = engine.ask(QUESTION, documents(2), method="auto").ledger
        assert ledger.method == "full"
        assert [f.reason for f in ledger.fallbacks] == ["unaffordable"]
        with pytest.raises(InputError, match="least possible"):
            engine.ask(QUESTION, documents(2), method="cacheblend:1%")


def test_known_answers_are_judged_by_score() -> None:
    docs = [
        Document(f"The colour of thing {n} is {colour}.", id=colour)
        for n, colour in enumerate(("red", "green", "blue", "black", "white", "grey", "pink", "brown"))
    ]
    texts = [f"What is the colour of thing {n}?" for n in range(8)]
    with make_engine() as engine:
        with pytest.raises(InputError, match="answers none of them"):
            engine.tune(docs, [Question(t, ("nothing of the kind",)) for t in texts], methods=("none",), prompts=8)
        unknown = engine.tune(docs, [Question(t) for t in texts], methods=("none",), prompts=8)
        assert unknown.judged_by == "fidelity"
        right = [_said(engine, t, docs) for t in texts]
        asked = [Question(t, (a or "?",)) for t, a in zip(texts, right, strict=True)]
        report = engine.tune(docs, asked, target=0.5, methods=("none", "random:1000000"), prompts=8)
        assert report.judged_by == "score"
        assert all(t.score is not None and t.quality == t.score for t in report.trials)
        exact = next(t for t in report.trials if t.method == "random:1000000")
        assert exact.score == pytest.approx(1.0), "all rows are full prefill, so the score is, too"


def test_answers_to_some_questions_alone_are_not_compared_with_the_target() -> None:
    asked = [Question(f"What does {d.id} do?", ("nothing",) if n < 3 else ()) for n, d in enumerate(documents(8))]
    with make_engine() as engine:
        report = engine.tune(documents(8), asked, methods=("none",), prompts=8)
    assert report.judged_by == "fidelity"
    assert all(t.score is None and t.quality == t.fidelity for t in report.trials)


def test_a_choice_that_cannot_run_on_the_other_half_is_not_used() -> None:
    docs = documents(8)
    texts = [f"{d.id} {d.id} {d.id}" + " zz" * (60 * (n % 2)) for n, d in enumerate(docs)]  # longer in the other half
    with make_engine() as engine:
        with pytest.raises(InputError, match="least possible") as refused:
            engine.ask(texts[0], docs[:5], method="prophetkv:0")
        least = int(str(refused.value).split("least possible is ")[1].split(" ")[0])
        method = f"prophetkv:{2 * least}"
        report = engine.tune(docs, [Question(t) for t in texts], target=0.01, methods=(method,), prompts=8)
        assert report.chosen == method
        assert report.held_out is None
        assert not report.accepted
        assert "least possible" in report.summary
        assert engine.ask(QUESTION, docs[:2], method="auto").ledger.method == "full"


def _said(engine: Engine, question: str, docs: list[Document]) -> str:
    """What full prefill answers over the retrieved documents, in the documents' own order."""
    found = {d.id for d in top_k(question, docs, engine.settings.top_k)}
    return engine.ask(question, [d for d in docs if d.id in found], method="full", max_new_tokens=16).text


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"target": 0.0}, "target"), ({"target": 1.5}, "target"), ({"prompts": 5}, "prompts"),
     ({"methods": ("full",)}, "full prefill is the truth"), ({"methods": ()}, "at least one"),
     ({"methods": ("none", "full:order=documents_first")}, "full prefill is the truth"),
     ({"methods": ("auto",)}, "auto runs what was measured"), ({"methods": ("non",)}, "did you mean"),
     ({"questions": [Question("What is this?")]}, "at least 3 are needed")],
)  # fmt: skip
def test_bad_input_is_named(changes: dict[str, object], match: str) -> None:
    with make_engine() as engine, pytest.raises(InputError, match=match):
        engine.tune(documents(4), **{"methods": ("none",), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"question": ""}',
        '{"question": "a", "answers": [1]}',
        '{"question": "a", "answers": {}}',
        "1",
        "[" * 10**5,
    ],
)
def test_a_question_of_another_form_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(f'{{"question": "fine"}}\n\n{line}\n')
    with pytest.raises(InputError, match="line 3"):
        read_questions(file)


def test_questions_are_read(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    lines = ['{"question": "a?", "answers": "x"}', '{"question": "b?", "answers": ["y", "z"]}', '{"question": "c?"}']
    file.write_text("\n".join(lines))
    assert read_questions(file) == [Question("a?", ("x",)), Question("b?", ("y", "z")), Question("c?")]
    with pytest.raises(InputError, match="no question"):
        read_questions(_empty(tmp_path))
    with pytest.raises(InputError, match="cannot be read"):
        read_questions(tmp_path / "missing")


def _empty(folder: Path) -> Path:
    (folder / "empty").write_text("\n")
    return folder / "empty"


def test_neighbours_are_those_of_all_documents_not_of_one_prompt() -> None:
    docs = documents(8)
    with make_engine() as whole, make_engine() as tuned:
        whole.compile(docs, gate=False, method="fusionrag")
        tuned.tune(docs, methods=("fusionrag:1000000",), prompts=6)
        assert {row.key for row in whole.store.ls()} <= {row.key for row in tuned.store.ls()}


def test_a_trained_writer_is_one_recipe_more() -> None:
    writers = {"sempic": random_writer(tiny(), "sempic"), "law": random_writer(tiny(), "joint", seed=2)}
    names = candidates(writers)
    assert names[:2] == ("sempic", "joint:writer=law"), "tried first, so that of equals they are the choice"
    assert set(names) > set(candidates())
    per_recipe = len(candidates()) // 2
    assert Counter(find_method(n).writer for n in names) == dict.fromkeys(("", "isolated", *writers), per_recipe)
    assert len({find_method(n) for n in names}) == len(names)
    assert candidates({"encoder": random_encoder(tiny())}) == ("encoder", *candidates()), "it has no rows to repair"


def test_writers_at_hand_are_tried_without_being_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvquilt.tuning._UNBUDGETED", ("none", "epic:k=2"))
    monkeypatch.setattr("kvquilt.tuning._BUDGETED", ())
    with make_engine(writers={"law": random_writer(tiny(), "sempic")}) as engine:
        report = engine.tune(documents(6), target=0.001, prompts=6)
        tried = {trial.method for trial in report.trials}
        assert tried == {*candidates(), "sempic:writer=law", "epic:k=2,writer=law"}
        assert engine.tuned() == report
        engine.use(random_writer(tiny(), "sempic", seed=2), "law")
        assert engine.tuned() is None, "another writer under the same name is another choice"


def test_every_default_candidate_is_a_method_and_the_picture_is_a_png(tuned: tuple[Engine, TuneReport]) -> None:
    names = candidates()
    assert len(names) == len({find_method(n).name for n in names}) > 40
    assert {find_method(n).writer for n in names} == {"", "isolated"}
    assert plot(tuned[1]).startswith(b"\x89PNG")
