"""Which documents a document is encoded behind, and that its segment is what a stock model computes there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvquilt.errors import InputError
from kvquilt.identity import namespace
from kvquilt.store import Store
from kvquilt.writers.neighbours import Neighbours
from kvquilt.writers.notebook import Notebook
from kvquilt.writers.similarity import most_similar
from kvquilt.writers.together import compile_together
from tests.models import tiny

SHARED = (2, 3)
CATS = (10, 11, 12, 50, 51)
MORE_CATS = (10, 11, 12, 60, 61)
A_CAT = (10, 52, 53, 54, 55)
DOGS = (20, 21, 22, 70, 71)
MORE_DOGS = (20, 21, 22, 80)
ALONE = (90, 91, 92)
ALL = [CATS, DOGS, ALONE, MORE_CATS, MORE_DOGS, A_CAT]


def notebook() -> Notebook:
    return Notebook(Store.open(None, 1 << 20), namespace(None), "fingerprint", tiny().vocabulary)


def prefixes(recipe: Neighbours, segments: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [writer.prefix for writer in recipe.prepare(notebook(), segments)]


def test_the_most_similar_come_first_and_strangers_never() -> None:
    assert most_similar(ALL, range(6)) == [[3, 5], [4], [], [0, 5], [1], [0, 3]]


def test_a_document_is_encoded_behind_the_shared_prefix_and_its_neighbours_in_the_order_of_the_call() -> None:
    found = prefixes(Neighbours(SHARED, 100), ALL)
    assert found == [
        SHARED + MORE_CATS + A_CAT,
        SHARED + MORE_DOGS,
        SHARED,
        SHARED + CATS + A_CAT,
        SHARED + DOGS,
        SHARED + CATS + MORE_CATS,
    ]
    assert prefixes(Neighbours(SHARED, 100, count=1), ALL)[0] == SHARED + MORE_CATS


def test_a_document_is_never_its_own_neighbour_though_it_comes_twice() -> None:
    assert prefixes(Neighbours(SHARED, 100), [CATS, CATS, DOGS]) == [SHARED] * 3


def test_neighbours_that_do_not_fit_are_passed_over() -> None:
    long = (*CATS, *range(100, 120))
    found = prefixes(Neighbours(SHARED, 2 + 5 + 6), [CATS, long, MORE_CATS])
    assert found == [SHARED + MORE_CATS, SHARED, SHARED + CATS]


def test_a_segment_is_what_full_prefill_computes_behind_the_same_documents() -> None:
    recipe, model = Neighbours(SHARED, 100), tiny("gemma3")
    writers = recipe.prepare(notebook(), ALL)
    for i, segment in compile_together(model, writers, ALL):
        cache = model.encode(torch.tensor([writers[i].prefix + ALL[i]]))
        rows = slice(segment.start, segment.start + segment.tokens)
        assert torch.allclose(segment.keys, cache.slot_keys[:, 0, :, rows], atol=1e-4)
        assert torch.allclose(segment.values, cache.slot_values[:, 0, :, rows], atol=1e-4)
        model.pool.release(cache)


@pytest.mark.parametrize("seed", ["0", "1"])
def test_every_process_chooses_the_same_neighbours(seed: str) -> None:
    program = (
        "import random; from kvquilt.writers.similarity import most_similar\n"
        "random.seed(0); docs = [tuple(random.choices(range(90), k=60)) for _ in range(30)]\n"
        "import hashlib; print(hashlib.sha256(repr(most_similar(docs, range(30))).encode()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.strip() == "7465dc9c26627aa8d1d9088616794a694011f1ce209a76c11ebd6632e22ed15f"


def test_other_settings_have_other_notes() -> None:
    notes = notebook()
    two = Neighbours(SHARED, 100).prepare(notes, ALL)
    one = Neighbours(SHARED, 100, count=1).prepare(notes, ALL)
    other = Neighbours((4,), 100).prepare(notes, ALL)
    assert len({two[0], one[0], other[0]}) == 3
    assert Neighbours(SHARED, 100).prepare(notes, ALL[:1]) == two[:1]


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(InputError, match="count"):
        Neighbours(SHARED, 100, count=0)
