"""Segments of several writers in one go: the same segments, and what they are encoded behind is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.placement import place_runs
from kvquilt.reading import Reader
from kvquilt.repair.presets import METHODS, find_method
from kvquilt.segment import CompiledSegment
from kvquilt.store import Store
from kvquilt.writers.attention_statistics import AttentionStatistics
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.prefix_cache import PrefixCache
from kvquilt.writers.residual import Residual
from kvquilt.writers.together import compile_together
from tests.models import tiny
from tests.oracle import close, full_prefill, random_ids, runs_of, stock

SHARED = random_ids(9, 50)
A, B, C, D = (random_ids(n, n) for n in (40, 25, 33, 18))

pytestmark = pytest.mark.usefixtures("nan_slots")


def rows(writers: list[Isolated], segments: list[tuple[int, ...]], family: str = "llama") -> int:
    """Compile them together, compare with one by one; how many rows that ran."""
    model, counter = tiny(family), RowCounter()
    lent = model.pool.lent
    found = dict(compile_together(model, writers, segments, counter))
    assert model.pool.lent == lent
    assert sorted(found) == list(range(len(segments)))
    for i, (writer, ids) in enumerate(zip(writers, segments, strict=True)):
        [(_, alone)] = writer.compile(model, [ids])
        assert (found[i].ids, found[i].start, found[i].prefix) == (alone.ids, alone.start, alone.prefix)
        assert torch.allclose(found[i].keys, alone.keys, atol=1e-5)
        assert torch.allclose(found[i].values, alone.values, atol=1e-5)
        assert list(found[i].side) == list(alone.side)
        assert all(torch.allclose(found[i].side[name], alone.side[name], atol=1e-4) for name in alone.side)
    return counter.rows


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-window"])
def test_a_chain_of_documents_is_one_forward_over_all_of_them(family: str) -> None:
    def behind(*earlier: tuple[int, ...]) -> Isolated:
        spans, at = [], len(SHARED)
        for ids in earlier:
            spans.append((at, at + len(ids)))
            at += len(ids)
        return Isolated(SHARED + sum(earlier, ()), (AttentionStatistics(tuple(spans)),))

    writers = [behind(A, B, C), behind(A), behind(), behind(A, B)]
    assert rows(writers, [D, B, A, C], family) == len(SHARED) + len(A) + len(B) + len(C) + len(D)


def test_documents_behind_the_same_prefix_encode_it_once() -> None:
    one, two = Isolated(SHARED + A + B), Isolated(SHARED + A + D)
    assert rows([one, two, one], [C, C, C[:-1]]) == len(SHARED + A + B) + len(D) + len(C) + 2 * len(C)


def test_writers_of_every_kind_go_together() -> None:
    writers = [Isolated(), Isolated(SHARED, (Residual(1),)), Isolated(SHARED), Isolated(A), Isolated(), Isolated(B)]
    segments = [A, B, C, D, D, A]
    assert rows(writers, segments) <= sum(len(w.prefix) + len(s) for w, s in zip(writers, segments, strict=True))


def test_the_same_segment_twice_comes_twice() -> None:
    writers = [Isolated(SHARED), Isolated(SHARED, (Residual(1),)), Isolated(SHARED, (Residual(1),))]
    assert rows(writers, [A, A, A]) == len(SHARED) + 3 * len(A), "each is compiled, behind one prefix"


def test_the_same_call_gives_the_same_bits() -> None:
    writers = [Isolated(SHARED + A), Isolated(SHARED), Isolated(SHARED + A, (Residual(2),))]
    one, two = (dict(compile_together(tiny(), writers, [B, C, D])) for _ in range(2))
    for i, segment in one.items():
        assert torch.equal(segment.keys, two[i].keys)
        assert torch.equal(segment.values, two[i].values)
        assert all(torch.equal(segment.side[name], two[i].side[name]) for name in segment.side)


def test_one_prefix_is_kept_at_a_time_and_leaving_early_gives_it_back() -> None:
    model, most = tiny(), 0
    lent = model.pool.lent
    writers = [Isolated(random_ids(50, n), (Residual(1),)) for n in range(5)]
    going = compile_together(model, writers, [A] * 5)
    for _ in range(4):
        next(going)
        most = max(most, model.pool.lent - lent)
    assert most == 1
    going.close()  # type: ignore[attr-defined]
    assert model.pool.lent == lent


def test_nothing_to_compile_is_nothing() -> None:
    assert list(compile_together(tiny(), [], [])) == []


def test_a_prefix_cache_holds_just_what_it_reached() -> None:
    model, counter = tiny(), RowCounter()
    with PrefixCache(model, counter) as prefix:
        steps = ((A, 40), (A + B, 25), (A + C, 33), (A[:7], 0), (B, 25), ((), 0), (B + A + C, 98))
        for ids, fresh in steps:
            before = counter.rows
            cache = prefix.reach(ids)
            assert (prefix.ids, cache.filled, counter.rows - before) == (ids, len(ids), fresh)
            if ids:
                truth = model.encode(torch.tensor([ids]))
                n = len(ids)
                assert torch.allclose(cache.slot_keys[:, :, :, :n], truth.slot_keys[:, :, :, :n], atol=1e-5)
                assert torch.allclose(cache.slot_values[:, :, :, :n], truth.slot_values[:, :, :, :n], atol=1e-5)
                model.pool.release(truth)


def test_a_prefix_cache_that_failed_computes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    with PrefixCache(model) as prefix:
        prefix.reach(A)
        with monkeypatch.context() as patch:
            patch.setattr(model.hf.base_model.layers[1], "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                prefix.reach(A + B)
        assert prefix.ids == A
        cache = prefix.reach(A + B)
        truth = model.encode(torch.tensor([A + B]))
        assert torch.allclose(cache.slot_keys[:, :, :, :65], truth.slot_keys[:, :, :, :65], atol=1e-5)
        model.pool.release(truth)


@dataclass(frozen=True, slots=True)
class Halved:
    """Values half as large: what no prompt computes, as with a trained writer."""

    @property
    def digest(self) -> str:
        return "halved"

    @property
    def encoded_behind(self) -> None:
        return None

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

    @property
    def side(self) -> frozenset[str]:
        return frozenset()

    def compile(
        self, model: LanguageModel, segments: Sequence[tuple[int, ...]], counter: RowCounter | None = None
    ) -> Iterator[tuple[int, CompiledSegment]]:
        for n, segment in Isolated().compile(model, segments, counter):
            yield n, replace(segment, values=segment.values / 2)


def test_a_writer_of_another_kind_goes_with_them() -> None:
    model, counter = tiny(), RowCounter()
    found = dict(compile_together(model, [Isolated(), Halved(), Isolated(SHARED)], [A, A, B], counter))
    assert torch.equal(found[1].values, found[0].values / 2)
    assert found[2].start == len(SHARED)
    assert counter.rows == 2 * len(A) + len(SHARED) + len(B)


def test_documents_of_another_kind_are_never_exact_and_any_selector_repairs_them() -> None:
    placement = place_runs(runs_of("ABi", (12, 9, 3)))
    truth = full_prefill(stock(), placement.ids)[-1:]
    reader = Reader(tiny(), Store.open(None, 1 << 28), Halved(), ())
    plain = Reader(tiny(), reader.store, Isolated(), ())

    def read(who: Reader, method: str) -> tuple[torch.Tensor, Ledger]:
        ledger = Ledger()
        out, cache = who.read(placement, find_method(method), None, ledger, 0)
        who.model.pool.release(cache)
        return out, ledger

    (reused, ledger), (other, exact) = read(reader, "none"), read(plain, "none")
    assert ledger.tokens[Provenance.EXACT] == 0
    assert exact.tokens[Provenance.EXACT] == 12, "alone and first in the prompt"
    assert not close(reused, other), "one store, two writers, two segments of the same ids"
    for name in ("random", "cacheblend", "prophetkv", "spread"):
        assert METHODS[name].budget is not None
        out, ledger = read(reader, f"{name}:1000000")
        assert close(out, truth)
        assert ledger.tokens[Provenance.RECOMPUTED] == 21
