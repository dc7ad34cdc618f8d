"""Several requests a step further at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvquilt.errors import IntegrityError
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rides import Part
from kvquilt.model.slots import SlotCache
from kvquilt.model.together import Together, TogetherCache


def forward_together(
    model: LanguageModel,
    ids: Sequence[Sequence[int]],
    caches: Sequence[SlotCache],
    counters: Sequence[RowCounter] | None = None,
    beside: Part | None = None,
) -> list[torch.Tensor]:
    """Write tokens behind what is filled of every cache; logits of all of them.

    Each request gets what it gets alone, but for rounding: products of many rows round otherwise than those of one.

    Args:
        ids: at least one for each cache.
        caches: different ones with the same `parts`.
        counters: one for each cache.
        beside: rows of another request over the same `parts`, of which no logits are wanted.

    Returns:
        For each cache fp32 logits ``[ids, vocabulary]``.

    Raises:
        IntegrityError: caches of different parts, or one cache twice.
        NumericsError: the model produced NaN.
    """
    if len(set(map(id, caches))) < len(caches) or len({id(cache.parts) for cache in caches}) != 1:
        raise IntegrityError("requests go together over different caches of the same trained parts")
    members = [(cache.tail(len(each)), cache) for each, cache in zip(ids, caches, strict=True)]
    flat = torch.tensor([[token for each in ids for token in each]])
    wanted, told = flat.numel(), list(counters or [RowCounter() for _ in caches])
    if beside is not None:  # in front: logits are of the last rows
        flat = torch.cat([beside.ids[None], flat], 1)
        members.insert(0, (beside.plan, beside.cache))
        told.insert(0, beside.counter)
    total = RowCounter()
    if len(members) == 1:
        ((plan, cache),) = members
        logits = model.forward(flat, plan, cache, wanted, total)[0]
    else:
        plan = Together(torch.arange(flat.numel()), max(plan.filled for plan, _ in members), members=tuple(members))
        logits = model.forward(flat, plan, TogetherCache(plan), wanted, total)[0]
    for (plan, cache), counter in zip(members, told, strict=True):
        rows = len(plan.rows)
        counter.rows += rows
        counter.token_layers += total.token_layers * rows // total.rows  # every row passes all layers
        counter.pairs += plan.pairs
        counter.besides += total.besides * rows / total.rows
        cache.filled, cache.view = plan.filled, plan.view
    return list(logits.split([len(each) for each in ids]))
