"""How close a method stays to full prefill: its distributions along full prefill's own greedy answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvquilt.answer import step
from kvquilt.ledger import Ledger
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.slots import SlotCache
from kvquilt.placement import Placement
from kvquilt.repair.presets import METHODS, Method

if TYPE_CHECKING:
    from kvquilt.engine import Engine


@dataclass(frozen=True, eq=False, slots=True)
class Spoken:
    """An answer and what the model thought at every step of it.

    Attributes:
        ids: the answer's tokens, the end token included if it was reached.
        steps: log-probabilities ``[answer, vocabulary]`` fp32 before each token.
        ledger: of reading the prompt.
    """

    ids: tuple[int, ...]
    steps: torch.Tensor
    ledger: Ledger


@dataclass(frozen=True, eq=False, slots=True)
class Closeness:
    """A method against full prefill, per answer token.

    Attributes:
        kl: ``[answer]`` nats, KL(full || method).
        agree: ``[answer]`` 1.0 where the most likely token is the same.
        spoken: the method's own greedy answer, if it was asked for; else the truth's tokens under the method.
    """

    kl: torch.Tensor
    agree: torch.Tensor
    spoken: Spoken


def speak(engine: Engine, placement: Placement, method: Method, tenant: str | None, tokens: int) -> Spoken:
    """The method's greedy answer of at most `tokens`. Not through a stream, which would end a live conversation."""
    model, ledger = engine.model, Ledger(method=method.name)
    logits, cache = engine.reader.read(placement, method, tenant, ledger, tokens)
    try:
        return _greedy(model, cache, logits[-1:], tokens, ledger)
    finally:
        model.pool.release(cache)


def truth(engine: Engine, placement: Placement, tenant: str | None, tokens: int) -> Spoken:
    """Full prefill's greedy answer."""
    return speak(engine, placement, METHODS["full"], tenant, tokens)


def compare(
    engine: Engine, placement: Placement, method: Method, tenant: str | None, true: Spoken, own: int = 0
) -> Closeness:
    """Force full prefill's answer through `method`, which sees the prompt alone when it chooses its rows.

    Args:
        own: let it give its own greedy answer, too, of at most so many tokens, from the same reading.
    """
    model, ledger = engine.model, Ledger(method=method.name)
    follow = list(true.ids[:-1])
    logits, cache = engine.reader.read(placement, method, tenant, ledger, max(len(follow), own))
    try:
        read, steps = cache.filled, [logits[-1:]]
        if follow:
            steps.append(model.forward(torch.tensor([follow]), cache.tail(len(follow)), cache, len(follow))[0])
        said = torch.cat(steps)
        forced = said.log_softmax(-1)
        # its own answer is the forced one up to where it would have said something else
        same = int((said.argmax(-1) == torch.tensor(true.ids, device=said.device)).long().cumprod(0).sum())
        known = min(same, len(follow), max(0, own - 1))
        cache.filled = read + known
        spoken = _greedy(model, cache, said[: known + 1], own, ledger) if own else Spoken(true.ids, forced, ledger)
    finally:
        model.pool.release(cache)
    return Closeness(*distances(true.steps, forced), spoken)


def distances(full: torch.Tensor, method: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(full || method) in nats, and 1.0 where the most likely token is the same, ``[rows]`` each.

    Args:
        full, method: log-probabilities ``[rows, vocabulary]``.
    """
    kl = (full.exp() * (full - method)).sum(-1).clamp_min(0.0)
    return kl, (full.argmax(-1) == method.argmax(-1)).float()


def _greedy(model: LanguageModel, cache: SlotCache, logits: torch.Tensor, tokens: int, ledger: Ledger) -> Spoken:
    """The greedy answer of at most `tokens` behind a cache that holds all of it but the last known token.

    Args:
        logits: ``[known, vocabulary]``, from the prompt's last row on.
    """
    steps = list(logits)
    ids = [int(each.argmax()) for each in steps]
    while len(ids) < tokens and ids[-1] not in model.stop_ids:
        steps.append(step(model, cache, ids[-1]))
        ids.append(int(steps[-1].argmax()))
    return Spoken(tuple(ids), torch.stack(steps).log_softmax(-1), ledger)
