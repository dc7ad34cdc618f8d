"""Controls that a method must pass before anything is said about it: theorems, tried on the real model and prompt.

Self-transfer: full prefill's own keys and values go through codec, store, placement and slots, and the inline rows are
computed behind them. All rows: the method's own segments are placed, and every row is computed again. Both must give
what full prefill gives; where they do not, the path is wrong, and what the method's answers are like says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from kvquilt.compiling import compile_documents
from kvquilt.endpoints import Check, limit_of
from kvquilt.fidelity import distances
from kvquilt.identity import digest_fields, encode_ids, namespace
from kvquilt.ledger import Ledger
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Order, Placement, place_runs
from kvquilt.prompt import Run
from kvquilt.repair.presets import METHODS, Method
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe
from kvquilt.segment import CompiledSegment, place
from kvquilt.writers.loaded import soft_rows
from kvquilt.writers.trained import Trained

if TYPE_CHECKING:
    from kvquilt.engine import Engine

_TENANT = "kvquilt self-transfer"  # of segments that are gone when a control ends


@dataclass(frozen=True, eq=False, slots=True)
class OwnRows:
    """A writer that has its segments already, by ids: full prefill's rows, turned back into the local frame."""

    segments: Mapping[tuple[int, ...], CompiledSegment] = field(repr=False)
    digest: str

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
        for i, ids in enumerate(segments):
            yield i, self.segments[ids]


@dataclass(frozen=True, slots=True)
class AllRows:
    """Every row, once the segments are placed: what full prefill must be, by the path of a method."""

    probe: Probe = Probe.QUESTION
    granularity: Granularity = Granularity.DOCUMENT

    def least(self, scene: Scene) -> int:
        return 0

    def choose(self, scene: Scene) -> Choice:
        return Choice(scene.slots)


def check_method(engine: Engine, method: Method, runs: Sequence[Run], ranking: Sequence[int]) -> list[Check]:
    """What applies of the two controls, on one prompt in the method's own order. No document may stand there twice.

    Positions that documents share are not those of full prefill, so neither applies; nor does the second to trained
    writers that need rows or layers which full prefill does not have. Nothing stays in the store, and no recipe learns.

    Args:
        ranking: the documents' indices, the retriever's best first.
    """
    if not method.reuses or method.order is Order.SHARED_POSITIONS:
        return []
    given = place_runs(runs, method.order, ranking if method.needs_ranking else (), method.moved)
    limit, width = limit_of(engine.model), min(8, len(given.runs[-1].ids))
    full, own = _full(engine, given, width)
    reader = replace(engine.reader, _notebooks={})
    # their order is the placement's already
    same = {"self-transfer": (replace(reader, writer=own), replace(METHODS["none"], name=method.name))}
    trained = reader.trained.get(method.writer)
    if trained is None or (isinstance(trained, Trained) and not soft_rows(trained)):
        same["all rows"] = reader, Method(method.name, Order.GIVEN, AllRows(), method.summary, writer=method.writer)
    checks = []
    try:
        if "all rows" in same:
            documents = [run.document for run in runs if run.document is not None]
            compile_documents(reader, documents, _TENANT, recipe=method.writer)
        for name, (read_with, as_full) in same.items():
            logits, cache = read_with.read(given, as_full, _TENANT, Ledger(), 1, width)
            engine.model.pool.release(cache)
            value = float(distances(full, logits.log_softmax(-1))[0].mean())
            checks.append(Check(name, value <= limit, value, limit))
    finally:
        engine.store.rm(namespace=namespace(_TENANT))
    return checks


def _full(engine: Engine, placement: Placement, width: int) -> tuple[torch.Tensor, OwnRows]:
    """Full prefill's last log-probabilities, and its documents' keys and values as segments."""
    model, ids = engine.model, placement.ids
    logits, cache = engine.reader.read(placement, METHODS["full"], _TENANT, Ledger(), 1, width)
    try:
        cut = {}
        for i in placement.documents():
            cut[placement.runs[i].ids] = cut_out(model, cache, placement, i)
    finally:
        model.pool.release(cache)
    digest = digest_fields("kvquilt 2026-11 self-transfer v1", [("prompt", encode_ids(ids))])
    return logits.log_softmax(-1), OwnRows(cut, digest)


def cut_out(model: LanguageModel, cache: SlotCache, placement: Placement, run: int) -> CompiledSegment:
    """A document's rows as they stand in a cache in which nothing was dropped, turned back into the local frame."""
    span = placement.span(run)
    keys = cache.slot_keys[:, 0, :, span.start : span.stop].cpu()
    values = cache.slot_values[:, 0, :, span.start : span.stop].clone().cpu()
    standing = CompiledSegment(placement.runs[run].ids, keys, values, placement.positions[run])
    local = torch.empty_like(keys, memory_format=torch.contiguous_format)
    place(standing, 0, model.capability.tables, local)
    return CompiledSegment(standing.ids, local, values.contiguous())
