"""Independent answers to compare with: stock transformers models, stock caches, no code of kvquilt's read path."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvquilt.document import Document
from kvquilt.placement import Placement
from kvquilt.prompt import Run
from tests.models import build
from tests.tokenizers import chatml_tokenizer

TOLERANCE = 1e-4  # of the largest logit, fp32


@functools.cache
def stock(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """The same weights as `tests.models.tiny`, in a model that kvquilt never touched."""
    return build(family, seed)


def random_ids(count: int, seed: int, vocabulary: int = 256) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, vocabulary, (count,), generator=generator).tolist())


@functools.cache
def _words() -> list[int]:
    """Tokens that are a space and letters, so that any row of them is what their text is tokenised to."""
    vocabulary = chatml_tokenizer().get_vocab()
    return sorted(i for text, i in vocabulary.items() if text[0] == "Ġ" and text[1:].isascii() and text[1:].isalpha())


def random_document(count: int, seed: int, name: str) -> tuple[tuple[int, ...], Document]:
    """Random ids and the document whose tokens they are under `chatml_tokenizer`."""
    words = _words()
    ids = tuple(words[i] for i in random_ids(count, seed, len(words)))
    return ids, Document(chatml_tokenizer().decode(ids), id=name, end="")


def runs_of(shape: str, lengths: Sequence[int], seed: int = 0) -> list[Run]:
    """Runs of random ids: ``i`` is inline text, a capital letter a document; the same letter is the same document."""
    made: dict[str, Run] = {}
    out = []
    for n, (kind, length) in enumerate(zip(shape, lengths, strict=True)):
        if kind == "i":
            out.append(Run(random_ids(length, 1000 * seed + 500 + n)))
        else:
            run = Run(*random_document(length, 1000 * seed + ord(kind), kind))
            out.append(made.setdefault(kind, run))
    return out


@torch.inference_mode()
def full_prefill(hf: PreTrainedModel, ids: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Logits ``[tokens, vocabulary]`` of a stock forward over all ids."""
    positions = torch.arange(offset, offset + len(ids))[None]
    return hf(input_ids=torch.tensor([list(ids)]), position_ids=positions, use_cache=False).logits[0].float()


@torch.inference_mode()
def _segment(hf: PreTrainedModel, ids: Sequence[int], start: int, prefix: Sequence[int]) -> list[Any]:
    """Keys and values of a document encoded where it will stand, behind `prefix` alone: nothing is ever rotated."""
    cache = DynamicCache()
    whole = [*prefix, *ids]
    positions = torch.arange(start - len(prefix), start + len(ids))[None]
    hf.base_model(input_ids=torch.tensor([whole]), position_ids=positions, cache=cache, use_cache=True)
    n = len(prefix)
    return [(layer.keys[:, :, n:], layer.values[:, :, n:]) for layer in cache.layers]


@torch.inference_mode()
def pure_reuse(
    hf: PreTrainedModel, placement: Placement, prefix: Sequence[int] = (), fresh: Sequence[int] = ()
) -> torch.Tensor:
    """Logits of the last run under pure reuse, part by part with stock caches.

    Args:
        fresh: indices of document runs that are computed in place like inline text.
    """
    layers: list[Any] = []
    logits = torch.empty(0)
    for index, (run, start) in enumerate(zip(placement.runs, placement.starts, strict=True)):
        if run.document is not None and index not in fresh:
            new = _segment(hf, run.ids, start, prefix)
            pairs = zip(layers or new, new, strict=True)
            joined = [(torch.cat((k, a), 2), torch.cat((v, b), 2)) for (k, v), (a, b) in pairs]
            layers = joined if layers else new
            continue
        cache = DynamicCache()
        for n, (keys, values) in enumerate(layers):
            cache.update(keys, values, n)
        positions = torch.arange(start, start + len(run.ids))[None]
        out = hf(input_ids=torch.tensor([run.ids]), position_ids=positions, cache=cache, use_cache=True)
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        logits = out.logits[0].float()
    return logits


def far(measured: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference relative to the largest logit."""
    return float((measured - truth).abs().max() / truth.abs().max())


def close(measured: torch.Tensor, truth: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return measured.shape == truth.shape and far(measured, truth) <= tolerance
