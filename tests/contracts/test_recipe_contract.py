"""What every recipe must do; a new one adds one line to `RECIPES`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvquilt.document import Document
from kvquilt.identity import SegmentKey, namespace, segment_key
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Run
from kvquilt.segment import CompiledSegment
from kvquilt.store import Layout, Store
from kvquilt.writers.constant import Constant
from kvquilt.writers.digest import Digest
from kvquilt.writers.in_situ import InSitu
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.neighbours import Neighbours
from kvquilt.writers.notebook import Notebook, pack
from kvquilt.writers.recipe import Recipe
from kvquilt.writers.recipes import RECIPES as NAMED
from kvquilt.writers.recipes import Ingredients, recipe
from kvquilt.writers.residual import Residual
from kvquilt.writers.together import compile_together
from tests.models import tiny
from tests.oracle import random_ids

SHARED = random_ids(9, 70)
DOCUMENTS = [random_ids(20 + n, 80 + n, vocabulary=40) for n in range(6)]
QUESTION = random_ids(12, 71)
MADE: dict[str, Callable[[], Recipe]] = {
    **{name: (lambda name=name: recipe(name, Ingredients(SHARED, 1024, (9, 8, 7)))) for name in NAMED},
    "shared prefix with a digest": lambda: Constant("digest", Isolated(SHARED, (Digest((5, 6)),))),
    "three neighbours, residual": lambda: Neighbours(SHARED, 1024, 3, (Residual(1),)),
    "in situ, pairs, residual": lambda: InSitu(SHARED, 1024, group=2, variants=2, extras=(Residual(2),)),
    "in situ, little room": lambda: InSitu(SHARED, 55),
}
every = pytest.mark.parametrize("name", MADE)

pytestmark = pytest.mark.usefixtures("nan_slots")


def placed(documents: Sequence[tuple[int, ...]], opening: tuple[int, ...] = SHARED) -> Placement:
    runs = [Run(ids, Document(str(n), id=str(n))) for n, ids in enumerate(documents)]
    return place_runs([Run(opening), *runs, Run(QUESTION)])


class Desk:
    """A store with one tenant's notebook, and the little of an engine that recipes need."""

    def __init__(self, store: Store, tenant: str | None = None) -> None:
        self.store, self.tenant, self.model = store, tenant, tiny()
        self.notes = Notebook(store, namespace(tenant), self.model.fingerprint.digest, self.model.vocabulary)
        self.compiled: list[tuple[Isolated, tuple[int, ...]]] = []

    def key(self, writer: Isolated, ids: tuple[int, ...]) -> SegmentKey:
        return segment_key(self.model.fingerprint.digest, writer.digest, self.tenant, ids)

    def fetch(
        self, recipe: Recipe, writers: Sequence[Isolated], segments: Sequence[tuple[int, ...]]
    ) -> list[CompiledSegment]:
        def compile(missing: list[int]) -> object:
            made = compile_together(self.model, [writers[i] for i in missing], [segments[i] for i in missing])
            for j, segment in made:
                i = missing[j]
                self.compiled.append((writers[i], segments[i]))
                for gone in recipe.compiled(self.notes, writers[i], segment):
                    assert gone != writers[i]
                    self.store.rm(key=self.key(gone, segments[i]))
                yield i, segment

        c = self.model.capability
        layout = Layout(self.model.dtype, c.layers, c.kv_heads, c.key_dim, c.value_dim, recipe.side)
        wanted = [(self.key(w, ids), ids) for w, ids in zip(writers, segments, strict=True)]
        with self.store.fetch(wanted, compile, layout) as held:  # type: ignore[arg-type]
            return [each.segment for each in held if each.segment is not None]

    def prepare(self, recipe: Recipe, segments: Sequence[tuple[int, ...]]) -> list[Isolated]:
        writers = recipe.prepare(self.notes, segments)
        self.fetch(recipe, writers, segments)
        return writers

    def ask(self, recipe: Recipe, placement: Placement) -> tuple[list[Isolated], list[str]]:
        at = placement.documents()
        chosen = recipe.writers(self.notes, placement, at)
        writers = [each.writer for each in chosen]
        segments = self.fetch(recipe, writers, [placement.runs[i].ids for i in at])
        assert [s.ids for s in segments] == [placement.runs[i].ids for i in at]
        return writers, [each.reason for each in chosen]

    def news(self) -> int:
        """How many segments were compiled since the last call."""
        count = len(self.compiled)
        self.compiled.clear()
        return count


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(Store.open(tmp_path, 1 << 26))


@every
def test_what_was_prepared_is_what_is_asked_for(name: str, desk: Desk) -> None:
    recipe = MADE[name]()
    prepared = desk.prepare(recipe, DOCUMENTS)
    assert len(prepared) == len(DOCUMENTS)
    assert desk.news() == len(DOCUMENTS)
    for order in ([3, 1, 5], [0, 1, 2, 3, 4, 5], [4]):
        writers, reasons = desk.ask(recipe, placed([DOCUMENTS[n] for n in order]))
        assert writers == [prepared[n] for n in order]
        assert reasons == [""] * len(order)
    assert desk.news() == 0


@every
def test_preparing_again_or_with_more_documents_leaves_what_is_stored_alone(name: str, desk: Desk) -> None:
    recipe = MADE[name]()
    first = desk.prepare(recipe, DOCUMENTS[:4])
    desk.news()
    assert desk.prepare(recipe, DOCUMENTS[3::-1]) == first[::-1]
    assert desk.news() == 0
    again = desk.prepare(recipe, [DOCUMENTS[5], *DOCUMENTS])
    assert again[1:5] == first
    assert again[0] == again[6]
    assert desk.news() == 2


@every
def test_the_same_documents_give_the_same_writers(name: str) -> None:
    recipe = MADE[name]()
    one, two = (Desk(Store.open(None, 1 << 26)).prepare(recipe, DOCUMENTS) for _ in range(2))
    assert one == two
    assert {writer.side for writer in one} == {recipe.side}


@every
def test_a_document_nobody_prepared_is_served_and_stays(name: str, desk: Desk) -> None:
    recipe, placement = MADE[name](), placed(DOCUMENTS[:3])
    first, reasons = desk.ask(recipe, placement)
    assert desk.news() == 3
    if isinstance(recipe, Constant):
        assert reasons == ["", "", ""]
    else:
        assert all(reasons), "nothing may be less than prepared in silence"
    assert desk.ask(recipe, placement)[0] == first
    assert desk.news() == 0


@every
def test_an_evicted_segment_is_compiled_again_as_it_was(name: str, desk: Desk) -> None:
    recipe = MADE[name]()
    prepared = desk.prepare(recipe, DOCUMENTS)
    before = desk.fetch(recipe, prepared, DOCUMENTS)[2]
    assert desk.store.rm(key=desk.key(prepared[2], DOCUMENTS[2])) == 1
    desk.news()
    writers, _ = desk.ask(recipe, placed([DOCUMENTS[2]]))
    assert writers == [prepared[2]]
    assert desk.news() == 1
    after = desk.fetch(recipe, writers, [DOCUMENTS[2]])[0]
    assert (after.start, after.prefix) == (before.start, before.prefix)
    assert float((after.keys - before.keys).abs().max()) < 1e-5


@every
def test_one_tenant_s_notes_are_not_another_s(name: str, desk: Desk) -> None:
    recipe, other = MADE[name](), Desk(desk.store, "other")
    prepared = desk.prepare(recipe, DOCUMENTS)
    _, reasons = other.ask(recipe, placed([DOCUMENTS[4], DOCUMENTS[1]]))
    assert other.news() == 2
    assert all(reasons) or isinstance(recipe, Constant)
    assert desk.ask(recipe, placed([DOCUMENTS[4]]))[0] == [prepared[4]]


@every
def test_notes_of_another_model_do_not_count(name: str, desk: Desk) -> None:
    recipe = MADE[name]()
    desk.prepare(recipe, DOCUMENTS)
    desk.notes = Notebook(desk.store, namespace(None), "another fingerprint", tiny().vocabulary)
    _, reasons = desk.ask(recipe, placed([DOCUMENTS[4], DOCUMENTS[1]]))
    assert all(reasons) or isinstance(recipe, Constant)


@every
@pytest.mark.parametrize(
    "content",
    [
        {},
        {"prefix": 3, "variants": 3},
        {"prefix": "no base64", "variants": ["x", None, {}]},
        {"prefix": "AAAA", "variants": [{"prefix": "AAAA"}]},
        {"prefix": None, "variants": {"a": 1}},
        {"prefix": "/////w==", "variants": []},
    ],
)
def test_a_note_that_says_something_else_counts_as_none(
    name: str, content: dict[str, object], desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = MADE[name]()
    monkeypatch.setattr(Notebook, "read", lambda *_: content)
    prepared = desk.prepare(recipe, DOCUMENTS[:2])
    _, reasons = desk.ask(recipe, placed(DOCUMENTS[:2]))
    assert all(reasons) or isinstance(recipe, Constant)
    assert len(prepared) == 2


@every
def test_a_note_with_ids_that_the_model_does_not_have_is_lost_and_said_so(
    name: str, desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, written = MADE[name](), dict[tuple[str, str], dict[str, object]]()
    write = Notebook.write
    with monkeypatch.context() as patch:
        patch.setattr(Notebook, "write", lambda _, *note: written.update({note[:2]: note[2]}) or write(_, *note))
        desk.prepare(recipe, DOCUMENTS[:3])
    foreign = {"prefix": pack((3, tiny().vocabulary))}
    for (kind, subject), content in written.items():
        listed = [
            {**each, **foreign, "documents": [], "earlier": [], "inter": []} for each in content.get("variants", [])
        ]
        assert desk.notes.write(kind, subject, {**content, **foreign, "variants": listed})
    assert len(written) == (0 if isinstance(recipe, Constant) else 3)
    _, reasons = desk.ask(recipe, placed(DOCUMENTS[:3]))
    assert all(reasons) or isinstance(recipe, Constant)
    assert len([record for record in caplog.records if "cannot be used" in record.message]) == len(written)
    desk.notes.check_integrity()


@every
def test_notes_that_cannot_be_written_are_counted_and_cost_only_compiles(
    name: str, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = MADE[name]()

    def full(*_: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr("kvquilt.store.files.os.fsync", full)
    desk.prepare(recipe, DOCUMENTS[:3])
    _, reasons = desk.ask(recipe, placed(DOCUMENTS[:3]))
    if isinstance(recipe, Constant):
        assert desk.notes.stats().failures == 0
    else:
        assert desk.notes.stats().failures >= 3
        assert all(reasons)


@every
def test_nothing_is_asked_of_nothing(name: str, desk: Desk) -> None:
    recipe = MADE[name]()
    assert recipe.prepare(desk.notes, []) == []
    assert recipe.writers(desk.notes, placed([]), []) == []


@every
def test_a_recipe_is_a_frozen_dataclass_with_a_name(name: str) -> None:
    recipe = MADE[name]()
    assert dataclasses.is_dataclass(recipe)
    assert hash(recipe) == hash(MADE[name]())
    assert recipe == MADE[name]()
    assert recipe.name in NAMED
    if name in NAMED:
        assert recipe.name == name
