"""What the student is measured by: how far its answers, and its states, are from the teacher's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import nll_loss

from kvquilt.errors import InputError
from kvquilt.training.teacher import Target


@dataclass(frozen=True, slots=True)
class Objective:
    """A weighted sum per answer token, in nats.

    Attributes:
        kl: weight of KL(teacher || student) over the vocabulary.
        ce: weight of the cross-entropy of the teacher's answer.
        dense: weight of the relative squared error of the hidden states that leave every layer at the inline rows.
        temperature: of both distributions in the KL, whose weight then grows by its square (distillation,
            arXiv 1503.02531).
    """

    kl: float = 1.0
    ce: float = 0.0
    dense: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if min(self.kl, self.ce, self.dense) < 0 or not 0 < self.kl + self.ce + self.dense < math.inf:
            raise InputError("objective", "weights are finite and at least 0, one of them above", f"{self}")
        if not 0 < self.temperature < math.inf:
            raise InputError("temperature", "a finite number above 0", self.temperature)


def divergence(target: Target, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """``[T]`` fp32: KL(teacher || student) in nats along the answer.

    Of a teacher that is kept in part, the tokens that are left out count as one outcome, which can only lower it.

    Args:
        logits: ``[T, vocabulary]`` of the student.
    """
    top, known = target.top.to(logits.device, torch.int64), target.log_probs.to(logits.device)
    rest = target.log_rest.to(logits.device)
    own = (logits.float() / temperature).log_softmax(-1)
    theirs = own.gather(-1, top)
    if temperature != 1.0:
        # the rest is one outcome whatever the temperature: its own spread is not known
        both = torch.cat((known, rest[:, None]), -1).div(temperature).log_softmax(-1)
        known, rest = both[:, :-1], both[:, -1]
    loss = (known.exp() * (known - theirs)).sum(-1)
    if top.shape[-1] == own.shape[-1]:
        return loss
    others = own.scatter(-1, top, -torch.inf).logsumexp(-1)
    return loss + rest.exp() * (rest - others)


def cross_entropy(target: Target, logits: torch.Tensor) -> torch.Tensor:
    """``[T]`` fp32: minus the log-probability of the teacher's answer."""
    answer = torch.tensor(target.answer, device=logits.device)
    return nll_loss(logits.float().log_softmax(-1), answer, reduction="none")


def state_error(
    states: torch.Tensor, hidden: Sequence[Sequence[torch.Tensor] | torch.Tensor], branch: int
) -> torch.Tensor:
    """Mean over layers of the squared error of hidden states, relative to the teacher's own squares.

    Args:
        states: ``[layers - 1, rows, width]`` of the teacher; `hidden`: by layer and branch, ``[at least rows, width]``.
            The last layer's is left out: the logits speak for it.
    """
    rows = states.shape[1]
    errors = []
    for theirs, own in zip(states.to(hidden[0][branch].device), hidden[:-1], strict=True):
        wanted = theirs.float()
        errors.append((own[branch][:rows].float() - wanted).square().sum() / wanted.square().sum())
    return torch.stack(errors).mean()
