"""Tempered attention against stock models in fp64 that attend in two parts, merged by log-sum-exp."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger, Provenance
from kvquilt.model.rows import SlotView
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Order, Placement, place_runs
from kvquilt.reading import Reader
from kvquilt.repair.ape import Tempered
from kvquilt.repair.presets import METHODS, Method, find_method
from kvquilt.store import Store
from kvquilt.writers.isolated import Isolated
from tests.models import build, tiny
from tests.oracle import _segment, close, far, pure_reuse, random_ids, runs_of, stock
from tests.repair.passes import FAMILIES
from tests.repair.scenes import scene_of

families = pytest.mark.parametrize("family", FAMILIES)
pytestmark = pytest.mark.usefixtures("nan_slots")
RUNS = runs_of("iABiCi", (5, 20, 27, 3, 9, 6))  # longer together than gemma3's window of 24
BEHIND = random_ids(7, 31)


@functools.cache
def double(family: str) -> PreTrainedModel:
    return build(family).double()


@functools.cache
def two_part(family: str) -> PreTrainedModel:
    """Runs the `eager_attention_forward` of its module, which a test replaces."""
    hf = build(family).double()
    hf.set_attn_implementation("eager")
    return hf


@dataclass(eq=False)
class TwoParts:
    """An eager attention in two parts; the last rows of `positions` ask.

    Attributes:
        positions: ``[T]`` of all keys, in the prompt's order; `documents`: ``[T]`` bool.
        by_slot: count windows in slots, which is wrong.
    """

    temperature: float
    scale: float
    by_slot: bool = False
    positions: torch.Tensor = field(init=False)
    documents: torch.Tensor = field(init=False)

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        rows, keys = query.shape[2], key.shape[2]
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        logits = query @ key.mT * module.scaling
        order = torch.arange(keys)
        asks = order[-rows:, None]
        seen = order <= asks
        window = getattr(module, "sliding_window", None)
        if window is not None:
            at = order if self.by_slot else self.positions
            seen = seen & (at[asks] - at < window)
        one = self._part(logits / self.temperature, value, seen & self.documents, self.scale * self.temperature)
        two = self._part(logits, value, seen & ~self.documents, 1.0)
        highest = torch.maximum(one[1], two[1])
        a, b = (one[1] - highest).exp(), (two[1] - highest).exp()
        return ((one[0] * a + two[0] * b) / (a + b)).transpose(1, 2).contiguous(), None

    @staticmethod
    def _part(
        logits: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.masked_fill(~seen, -torch.inf)
        total = logits.logsumexp(-1, keepdim=True)
        # a part of which nothing is seen weighs nothing, whatever its sum is multiplied by
        empty = total == -torch.inf
        return logits.softmax(-1).nan_to_num(0) @ value, (total * factor).masked_fill(empty, -torch.inf)


@torch.inference_mode()
def two_part_reuse(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    placement: Placement,
    attention: TwoParts,
    prefix: Sequence[int] = (),
    more: Sequence[int] = (),
) -> torch.Tensor:
    """Logits ``[rows, vocabulary]`` of the last run and of the tokens `more` behind it, which run one by one."""
    hf = two_part(family)
    monkeypatch.setattr(sys.modules[type(hf).__module__], "eager_attention_forward", attention)
    layers: list[Any] = []
    positions, documents, out = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool), []
    runs = [(run.ids, p, run.document is not None) for run, p in zip(placement.runs, placement.positions, strict=True)]
    runs += [((i,), placement.end + n, False) for n, i in enumerate(more)]
    for number, (ids, start, is_document) in enumerate(runs):
        here = torch.arange(start, start + len(ids))
        positions = torch.cat((positions, here))
        documents = torch.cat((documents, torch.full((len(ids),), is_document)))
        if is_document:
            new = _segment(double(family), ids, start, prefix)
            layers = [(torch.cat((k, a), 2), torch.cat((v, b), 2)) for (k, v), (a, b) in zip(layers, new, strict=True)]
            continue
        attention.positions, attention.documents = positions, documents
        cache = DynamicCache()
        for n, (keys, values) in enumerate(layers):
            cache.update(keys, values, n)
        logits = hf(input_ids=torch.tensor([ids]), position_ids=here[None], cache=cache, use_cache=True).logits[0]
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        if number >= len(placement.runs) - 1:
            out.append(logits.float())
    return torch.cat(out)


def read(
    method: Method, family: str = "llama", prefix: tuple[int, ...] = (), room: int = 0, runs: Sequence[Any] = RUNS
) -> tuple[torch.Tensor, SlotCache, Placement, Ledger, Reader]:
    """The caller gives the cache back."""
    reader, ledger = Reader(tiny(family), Store.open(None, 1 << 28), Isolated(prefix), ()), Ledger()
    placement = place_runs(runs, method.order)
    out, cache = reader.read(placement, method, None, ledger, room, len(runs[-1].ids))
    return out, cache, placement, ledger, reader


@families
@pytest.mark.parametrize("prefix", [(), BEHIND], ids=["alone", "behind"])
@pytest.mark.parametrize("options", ["", "temperature=0.5,scale=1.3", "temperature=3,scale=0.2"])
def test_documents_side_by_side_in_two_parts(
    monkeypatch: pytest.MonkeyPatch, family: str, prefix: tuple[int, ...], options: str
) -> None:
    method = find_method(f"ape:{options}")
    correction = method.correction
    assert isinstance(correction, Tempered)
    out, cache, placement, _, reader = read(method, family, prefix)
    reader.model.pool.release(cache)
    assert placement.positions == (0, 5, 5, 32, 35, 44), "neighbouring documents begin together"
    attention = TwoParts(correction.temperature, correction.scale)
    truth = two_part_reuse(monkeypatch, family, placement, attention, prefix)
    assert close(out, truth)
    plain = two_part_reuse(monkeypatch, family, placement, TwoParts(1, 1), prefix)
    assert far(out, plain) > 1e-2, "nothing is tempered here"


@families
def test_one_and_one_at_the_given_positions_is_reuse(family: str) -> None:
    out, cache, placement, _, reader = read(find_method("ape:order=given,temperature=1,scale=1"), family, BEHIND)
    reader.model.pool.release(cache)
    assert cache.view is not None
    assert close(out, pure_reuse(stock(family), placement, BEHIND))


@families
@pytest.mark.parametrize("order", [Order.SHARED_POSITIONS, Order.GIVEN])
def test_what_is_decoded_and_asked_behind_attends_in_two_parts_as_well(
    monkeypatch: pytest.MonkeyPatch, family: str, order: Order
) -> None:
    more = random_ids(6, 4)
    out, cache, placement, ledger, reader = read(find_method(f"ape:order={order}"), family)
    truth = two_part_reuse(monkeypatch, family, placement, TwoParts(0.9, 0.9), more=more)
    rows = [out]
    try:
        cache = reader.model.pool.grow(cache, cache.filled + 3)
        for i in more[:3]:
            rows.append(reader.model.forward(torch.tensor([[i]]), cache.tail(1), cache)[0])
        assert cache.next_position == placement.end + 3
        last, cache = reader.extend(cache, list(more[3:]), "ape", ledger, 5)
        assert cache.next_position == placement.end + 6
    finally:
        reader.model.pool.release(cache)
    measured = torch.cat(rows)
    assert close(measured, truth[: len(measured)])
    assert close(last, truth[-1:])


def test_windows_are_counted_in_logical_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots say that the first document is out of the window; it stands inside."""
    out, cache, placement, _, reader = read(METHODS["ape"], "gemma3")
    reader.model.pool.release(cache)
    assert close(out, two_part_reuse(monkeypatch, "gemma3", placement, TwoParts(0.9, 0.9)))
    assert far(out, two_part_reuse(monkeypatch, "gemma3", placement, TwoParts(0.9, 0.9, by_slot=True))) > 1e-2


def test_a_document_behind_what_it_was_encoded_behind_is_corrected_too() -> None:
    runs = [type(RUNS[0])(BEHIND), *RUNS[1:]]
    tokens = {}
    for name in ("none", "ape"):
        _, cache, _, ledger, reader = read(METHODS[name], prefix=BEHIND, runs=runs)
        reader.model.pool.release(cache)
        tokens[name] = {k: v for k, v in ledger.tokens.items() if v}
        assert ledger.spending is not None
        assert ledger.spending.charged == 0
    assert tokens["none"] == {Provenance.EXACT: 20, Provenance.REUSED: 36, Provenance.INLINE: 16}
    assert tokens["ape"] == {Provenance.CORRECTED: 56, Provenance.INLINE: 16}


def test_what_is_marked() -> None:
    scene = scene_of("iABi", (2, 3, 1, 2), exact=[1])
    view = Tempered(0.8, 1.1).view(scene, None)
    assert view is not None
    assert view.tempered is not None
    assert view.tempered.tolist() == [False] * 2 + [True] * 4 + [False] * 2
    assert (view.temperature, view.scale, view.shift) == (0.8, 1.1, 0)
    assert view.at(torch.arange(10)).tolist() == list(range(10))
    given = SlotView(torch.tensor([0, 1, 2, 3, 4, 2, 5, 6]), -1)
    placed = Tempered().view(scene, given)
    assert placed is not None
    assert torch.equal(placed.at(torch.arange(10)), given.at(torch.arange(10)))


def test_without_documents_nothing_changes() -> None:
    scene = scene_of("i", (4,))
    given = SlotView(torch.arange(4))
    assert Tempered().view(scene, None) is None
    assert Tempered().view(scene, given) is given


def test_dropped_rows_are_refused() -> None:
    with pytest.raises(InputError, match=r"correction: .*dropped"):
        Tempered().view(scene_of("iABi", (2, 3, 1, 2)), SlotView(torch.tensor([0, 1, 6, 7])))


@pytest.mark.parametrize("field", ["temperature", "scale"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_factors_that_make_no_sense(field: str, value: str) -> None:
    with pytest.raises(InputError, match=f"{field}: must be a finite number above 0"):
        find_method(f"ape:{field}={value}")


@pytest.mark.parametrize("name", ["epic", "random", "agentkvshift"])
def test_rows_that_see_each_other_do_not_share_positions(name: str) -> None:
    with pytest.raises(InputError, match=r"order: .*cannot share positions"):
        find_method(f"{name}:order=shared_positions")
