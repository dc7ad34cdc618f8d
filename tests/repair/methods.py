"""Every method of `METHODS` on one prompt, and rows counted by hooks that share nothing with the code's own."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvquilt.errors import InputError
from kvquilt.ledger import Ledger
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.load import weights_digest
from kvquilt.placement import Placement, place_runs
from kvquilt.prompt import Run
from kvquilt.reading import Reader
from kvquilt.repair.budget import Budget
from kvquilt.repair.presets import METHODS, Method
from kvquilt.store import Store
from kvquilt.writers.encoder import ENCODER
from kvquilt.writers.isolated import Isolated
from kvquilt.writers.link_tokens import LinkTokens
from tests.models import build, tiny
from tests.tokenizers import chatml_tokenizer
from tests.writers.trained import random_writers

# options of selectors that name fewer rows or layers than all, so that they name all of three documents of forty tokens
WHOLE = {"retrieved-document": "documents=3", "epic": "k=40", "droidspeak": "last=3"}
REUSING = [name for name, method in METHODS.items() if method.reuses]
SLOTTED = [name for name in METHODS if name != ENCODER]  # an encoder's documents have no slots, and tests of their own


def reader_of(family: str = "llama", preamble: Sequence[int] = ()) -> Reader:
    model, store, opening = tiny(family), Store.open(None, 1 << 28), tuple(preamble)
    return Reader(model, store, Isolated(opening), opening, helper=small(), trained=random_writers(model))


@functools.cache
def small() -> LanguageModel:
    """A helper of a third of the work."""
    hf = build("llama", 1, num_hidden_layers=1)
    return LanguageModel.wrap(hf, chatml_tokenizer(), "small", weights_digest(hf))


def ordered(runs: Sequence[Run], method: Method) -> Placement:
    """The runs in the method's order; its retriever ranks the documents from the first to the last."""
    documents = sum(run.document is not None for run in runs)
    return place_runs(runs, method.order, range(documents) if method.needs_ranking else (), method.moved)


def ids_in_order(placement: Placement, ledger: Ledger) -> tuple[int, ...]:
    """Ids of the prompt with its documents as the ledger says they stood."""
    runs = {run.document.id: i for i, run in enumerate(placement.runs) if run.document is not None}
    return placement.reordered([runs[d.id] for d in ledger.documents]).ids


def wrapped(reader: Reader, placement: Placement, method: Method) -> Placement:
    """With the soft rows that the method's writer puts around documents or behind them."""
    if not method.reuses or method.writer not in reader.trained:
        return placement
    writer = reader.trained[method.writer]
    if isinstance(writer, LinkTokens):
        return writer.linked(placement, method.order)
    return placement.wrapped(dict.fromkeys(placement.documents(), writer.around))


def read(reader: Reader, placement: Placement, method: Method, logits: int = 1) -> tuple[torch.Tensor, Ledger]:
    ledger = Ledger()
    out, cache = reader.read(placement, method, None, ledger, 0, logits)
    reader.model.pool.release(cache)
    return out, ledger


def within(method: Method, share: float | None = None, token_layers: int | None = None) -> Method:
    return dataclasses.replace(method, budget=Budget(share, token_layers))


def least(reader: Reader, placement: Placement, method: Method) -> int:
    """The least budget in token-layers, as the error says it; 0 where none is needed."""
    refusal = refused(reader, placement, within(method, token_layers=0))
    return int(re.findall(r"the least possible is (\d+)", str(refusal))[0]) if refusal is not None else 0


def refused(reader: Reader, placement: Placement, method: Method) -> InputError | None:
    """Why the method's budget is too small for this prompt, if it is."""
    try:
        reader.check(placement, method)
    except InputError as error:
        return error
    return None


def roomy(method: Method) -> Method:
    """The method with a budget that pays for every probe on a short prompt, where it has one at all."""
    return within(method, share=1.0) if method.budget is not None else method


class Passed:
    """Rows by layer: those that entered it, and those that left its attention for the other half of the layer."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.entered = [0] * model.capability.layers
        self.finished = [0] * model.capability.layers

    @property
    def charge(self) -> int:
        """Token-layers, where a row that left a layer early costs the weights of its projections, rounded up."""
        layers = self._model.hf.base_model.layers
        whole = sum(p.numel() for layer in layers for p in layer.parameters())
        attention = [(n, p.numel()) for layer in layers for n, p in layer.self_attn.named_parameters()]
        projections = sum(size for name, size in attention if not name.startswith("o_proj"))
        early = sum(self.entered) - sum(self.finished)
        return sum(self.finished) + math.ceil(early * projections / whole)


@contextmanager
def rows_passing(model: LanguageModel) -> Iterator[Passed]:
    """Hooks inside the decoder layers: on the norm in front of attention, and on the feed-forward behind it."""
    passed = Passed(model)

    def counting(counts: list[int], layer: int) -> object:
        def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            counts[layer] += args[0].shape[0] * args[0].shape[1]

        return count

    handles = []
    for n, layer in enumerate(model.hf.base_model.layers):
        handles.append(layer.input_layernorm.register_forward_pre_hook(counting(passed.entered, n)))
        handles.append(layer.mlp.register_forward_pre_hook(counting(passed.finished, n)))
    try:
        yield passed
    finally:
        for handle in handles:
            handle.remove()
