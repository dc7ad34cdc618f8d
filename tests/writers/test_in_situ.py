"""Variants of documents that were encoded where they stood."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from kvquilt.document import Document
from kvquilt.errors import InputError
from kvquilt.identity import namespace
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Run
from kvquilt.segment import CompiledSegment
from kvquilt.store import Store
from kvquilt.writers.attention_statistics import AttentionStatistics
from kvquilt.writers.chunk_scores import ChunkScores, document_digest
from kvquilt.writers.in_situ import InSitu
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.notebook import Notebook, Use, pack
from kvquilt.writers.together import compile_together
from kvquilt.writers.variants import Variant, variants_of, with_variant
from tests.engines import QUESTION as QUESTION_TEXT
from tests.engines import documents as texts
from tests.engines import make_engine
from tests.models import tiny
from tests.oracle import random_ids

SHARED, QUESTION = random_ids(5, 60), random_ids(6, 61)
A, B, C, D, E = (random_ids(14 + n, n) for n in range(5))
RECIPE = InSitu(SHARED, 1024)


@pytest.fixture
def notes() -> Notebook:
    return Notebook(Store.open(None, 1 << 20), namespace(None), "fingerprint", tiny().vocabulary)


def placed(*documents: tuple[int, ...], opening: tuple[int, ...] = SHARED) -> Placement:
    runs = [Run(ids, Document(str(n), id=str(n))) for n, ids in enumerate(documents)]
    return place_runs([Run(opening), *runs, Run(QUESTION)])


def learn(
    recipe: InSitu,
    notes: Notebook,
    writers: Sequence[Isolated],
    segments: Sequence[tuple[int, ...]],
    family: str = "llama",
) -> list[CompiledSegment]:
    found = dict(compile_together(tiny(family), writers, segments))
    for i, segment in found.items():
        recipe.compiled(notes, writers[i], segment)
    return [found[i] for i in range(len(segments))]


def ask(recipe: InSitu, notes: Notebook, placement: Placement) -> list[Isolated]:
    return [each.writer for each in recipe.writers(notes, placement, placement.documents())]


def spans(writer: Isolated) -> tuple[tuple[int, int], ...]:
    [statistics] = [each for each in writer.extras if isinstance(each, AttentionStatistics)]
    return statistics.documents


def scored(prefix: tuple[int, ...], *documents: tuple[int, ...], inter: float = 1.0, use: Use | None = None) -> Variant:
    """A variant behind `documents`, each of which got the same attention."""
    edges, at = [], len(prefix) - sum(len(ids) for ids in documents)
    for ids in documents:
        edges.append((at, at + len(ids)))
        at += len(ids)
    names = tuple(document_digest(ids) for ids in documents)
    lengths = tuple(len(ids) for ids in documents)
    scores = ChunkScores(names, (inter,) * len(documents), lengths, 10.0, len(D))
    return Variant(prefix, tuple(edges), scores, use or Use())


def test_documents_stand_in_groups_behind_the_earlier_ones(notes: Notebook) -> None:
    writers = InSitu(SHARED, 1024, group=3).prepare(notes, [A, B, C, D, A, E])
    assert [writer.prefix for writer in writers] == [SHARED, SHARED + A, SHARED + A + B, SHARED, SHARED, SHARED + D]
    assert spans(writers[2]) == ((5, 5 + len(A)), (5 + len(A), 5 + len(A + B)))
    assert spans(writers[3]) == ()


def test_a_group_ends_where_the_context_would(notes: Notebook) -> None:
    writers = InSitu(SHARED, len(SHARED + A + B), group=9).prepare(notes, [A, B, C])
    assert [writer.prefix for writer in writers] == [SHARED, SHARED + A, SHARED]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_in_the_order_they_were_compiled_in_documents_are_exact(notes: Notebook, family: str) -> None:
    prepared = RECIPE.prepare(notes, [A, B, C, D])
    segments = learn(RECIPE, notes, prepared, [A, B, C, D], family)
    placement = placed(A, B, C, D)
    assert ask(RECIPE, notes, placement) == prepared
    model = tiny(family)
    cache = model.encode(torch.tensor([placement.ids]))
    for i, segment in zip(placement.documents(), segments, strict=True):
        span = slice(placement.span(i).start, placement.span(i).stop)
        assert prepared[i - 1].encoded_behind == placement.ids[: span.start]
        for mine, truth in ((segment.keys, cache.slot_keys), (segment.values, cache.slot_values)):
            error = (mine - truth[:, 0, :, span]).abs().amax((1, 2, 3)) / truth[:, 0, :, span].abs().amax((1, 2, 3))
            assert float(error.max()) < 1e-4
    model.pool.release(cache)


def test_the_first_ask_encodes_a_document_where_it_stands(notes: Notebook) -> None:
    placement = placed(C, A, opening=random_ids(11, 62))
    first = RECIPE.writers(notes, placement, placement.documents())
    assert [each.writer.prefix for each in first] == [placement.ids[:11], placement.ids[: 11 + len(C)]]
    assert spans(first[1].writer) == ((11, 11 + len(C)),)
    assert all(each.reason for each in first)
    learn(RECIPE, notes, [each.writer for each in first], [C, A])
    again = RECIPE.writers(notes, placement, placement.documents())
    assert [each.writer for each in again] == [each.writer for each in first]
    assert not any(each.reason for each in again)


def keep(recipe: InSitu, notes: Notebook, *variants: Variant) -> None:
    recipe._write(notes, D, list(variants))


def test_the_variant_that_needs_the_least_recompute_serves(notes: Notebook) -> None:
    behind_a, behind_ab, behind_c = (
        scored(SHARED + A, A),
        scored(SHARED + A + B, A, B),
        scored(SHARED + C, C),
    )
    keep(RECIPE, notes, behind_c, behind_a, behind_ab)
    for documents, best in (
        ((A, D), behind_a),
        ((A, B, D), behind_ab),
        ((C, D), behind_c),
        ((E, C, D), behind_c),
        ((E, A, D), behind_a),
    ):
        assert ask(RECIPE, notes, placed(*documents))[-1].prefix == best.prefix
    # both documents are there, but turned round: half of a pair is worse than the whole of one document
    assert ask(RECIPE, notes, placed(B, A, D))[-1].prefix == behind_a.prefix


def test_of_variants_that_fit_alike_the_exact_one_serves_then_the_older(notes: Notebook) -> None:
    other = random_ids(8, 63)
    keep(RECIPE, notes, scored(SHARED + A, A), scored(other + A, A))
    assert ask(RECIPE, notes, placed(A, D))[-1].prefix == SHARED + A
    assert ask(RECIPE, notes, placed(A, D, opening=other))[-1].prefix == other + A
    assert ask(RECIPE, notes, placed(A, D, opening=QUESTION))[-1].prefix == SHARED + A


def test_where_no_variant_is_good_enough_the_document_gets_one_more(notes: Notebook) -> None:
    strict = InSitu(SHARED, 1024, renew=0.4)
    keep(strict, notes, scored(SHARED + A, A))
    assert ask(strict, notes, placed(A, D))[-1].prefix == SHARED + A
    [chosen] = strict.writers(notes, placed(C, D), [2])
    assert (chosen.writer.prefix, bool(chosen.reason)) == (SHARED + C, True)
    learn(strict, notes, [chosen.writer], [D])
    assert [each.prefix for each in strict._variants(notes, D)] == [SHARED + A, SHARED + C]
    assert ask(strict, notes, placed(C, D))[-1].prefix == SHARED + C


def test_what_saved_least_goes_and_is_named() -> None:
    known = [
        scored(SHARED + A, A, use=Use(9, 1.0)),
        scored(SHARED + B, B, use=Use(2, 1.5)),
        scored(SHARED + C, C, use=Use(3, 1.0)),
    ]
    new = scored(SHARED + E, E)
    kept, gone = with_variant(known, new, 3)
    assert (kept, gone) == ([known[1], known[2], new], [known[0]])
    assert with_variant(known, new, 4) == ([*known, new], [])
    kept, gone = with_variant(known, new, 1)
    assert (kept, len(gone)) == ([new], 3)


def test_never_more_variants_than_allowed_and_the_caller_hears_which_went(notes: Notebook) -> None:
    few = InSitu(SHARED, 1024, variants=2, renew=0.0)
    gone: list[Isolated] = []
    for before in (A, B, C, E):
        writer = ask(few, notes, placed(before, D))[-1]
        assert writer.prefix == SHARED + before
        [(_, segment)] = writer.compile(tiny(), [D])
        gone += few.compiled(notes, writer, segment)
    assert [each.prefix for each in few._variants(notes, D)] == [SHARED + C, SHARED + E]
    assert [writer.prefix for writer in gone] == [SHARED + A, SHARED + B]
    assert [spans(writer) for writer in gone] == [((5, 5 + len(A)),), ((5, 5 + len(B)),)]


def test_uses_are_collected_and_written_now_and_then(notes: Notebook) -> None:
    keep(RECIPE, notes, scored(SHARED + A, A), scored(SHARED + C, C))
    for _ in range(15):
        ask(RECIPE, notes, placed(A, D))
    assert [each.use.hits for each in RECIPE._variants(notes, D)] == [0, 0], "no disk is waited for"
    ask(RECIPE, notes, placed(E, D))
    first, second = (each.use for each in RECIPE._variants(notes, D))
    share = RECIPE._variants(notes, D)[1].scores.share(1.0, [document_digest(E)])
    assert 0.5 < share < 1
    assert first == Use(15, 15.0)
    assert (second.hits, second.saved) == (1, pytest.approx(1 - share))
    ask(RECIPE, notes, placed(C, D))
    learn(RECIPE, notes, [Isolated(SHARED + B, (AttentionStatistics(((5, 5 + len(B)),)),))], [D])
    assert [each.use.hits for each in RECIPE._variants(notes, D)] == [15, 2, 0], "a new variant writes what waits"


def test_a_request_uses_a_variant_once_and_one_that_is_refused_not_at_all() -> None:
    with make_engine() as engine:
        docs = texts(2)
        engine.compile(docs, gate=False, method="cache-craft")

        def hits() -> int:
            return sum(use.hits for uses in engine.reader.notes(None)._uses.values() for use in uses.values())

        engine.ask(QUESTION_TEXT, docs[::-1], method="cache-craft", max_new_tokens=1)
        assert hits() == len(docs)
        with pytest.raises(InputError, match="least possible"):
            engine.ask(QUESTION_TEXT, docs[::-1], method="cacheblend:writer=in-situ,1")
        assert hits() == len(docs)


def test_a_lost_update_only_costs_a_compile(notes: Notebook) -> None:
    placement = placed(A, D)
    first = ask(RECIPE, notes, placement)
    learn(RECIPE, notes, first, [A, D])
    RECIPE._write(notes, D, [])  # somebody else's older note wins
    again = ask(RECIPE, notes, placement)
    assert again == first, "encoded anew, and under the same key"
    learn(RECIPE, notes, again, [A, D])
    assert ask(RECIPE, notes, placement) == first
    assert len(RECIPE._variants(notes, A)) == 1, "what is known is not noted twice"


def test_a_variant_survives_its_note_bit_by_bit(notes: Notebook) -> None:
    variant = scored(SHARED + A + B, A, B, inter=1 / 3, use=Use(3, math.pi))
    keep(RECIPE, notes, variant)
    assert RECIPE._variants(notes, D) == [variant]


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": "x"},
        {"prefix": None},
        {"prefix": pack((tiny().vocabulary,) * 19)},
        {"documents": [[5, 900]]},
        {"documents": [[9, 5]]},
        {"documents": [[5, 7], [6, 19]]},
        {"documents": 5},
        {"documents": [[5]]},
        {"earlier": []},
        {"inter": [1.0, 2.0]},
        {"inter": [-1.0]},
        {"inter": ["much"]},
        {"intra": 0.0},
        {"intra": None},
        {"hits": -1},
        {"saved": 1e999},
        {"saved": {}},
    ],
)
def test_an_unsound_variant_counts_as_none_and_the_others_stay(change: dict[str, object]) -> None:
    good = scored(SHARED + A, A)
    note = {"variants": [good.as_note() | change, good.as_note()]}
    assert variants_of(note, len(D), tiny().vocabulary) == ([good], False)
    assert variants_of({"variants": note["variants"][1:]}, len(D), tiny().vocabulary) == ([good], True)


@pytest.mark.parametrize(("field", "value"), [("group", 0), ("variants", 0), ("alpha", -0.1), ("alpha", float("nan"))])
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(InputError, match=field):
        InSitu(SHARED, 1024, **{field: value})  # type: ignore[arg-type]


def test_alpha_scales_what_a_variant_needs(notes: Notebook) -> None:
    # at alpha 3 every variant of the wrong documents needs all rows, and the older serves
    keep(RECIPE, notes, scored(SHARED + C, C), scored(SHARED + A + B, A, B))
    assert ask(RECIPE, notes, placed(A, E, D))[-1].prefix == SHARED + A + B
    assert ask(InSitu(SHARED, 1024, alpha=9.0), notes, placed(A, E, D))[-1].prefix == SHARED + C
