"""The teacher: the model itself with the whole context, and what it says there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch

from kvquilt.model.language_model import LanguageModel
from kvquilt.model.packed import Packed, side_by_side
from kvquilt.model.rows import RowPlan, Watcher
from kvquilt.training.lesson import Lesson


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """What the teacher does behind one question.

    Attributes:
        answer: its own greedy answer, T tokens, the end token included if it was reached.
        top: ``[T, k]`` int32 ids of the most likely tokens before each answer token.
        log_probs: ``[T, k]`` fp32 of them.
        log_rest: ``[T]`` fp32, log of the probability of all others; -inf where there are none.
        hidden: ``[layers - 1, rows, width]``, what leaves every layer but the last at the question's rows and the
            answer's but the last, bfloat16; None unless the objective looks at it.
    """

    answer: tuple[int, ...]
    top: torch.Tensor
    log_probs: torch.Tensor
    log_rest: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Teacher:
    """Answers greedily on the full context, no labels needed.

    Attributes:
        new_tokens: an answer's length at most; one that is cut there has no end token.
        top: most likely tokens that are kept per answer token; 0 keeps all.
        hidden: keep hidden states, for the dense objective.
    """

    new_tokens: int = 32
    top: int = 64
    hidden: bool = False

    def targets(self, model: LanguageModel, lesson: Lesson) -> list[Target]:
        """One target per question. The documents are read once and the questions side by side.

        All branches share a column's slot: where one still reads its question, another already answers.

        Raises:
            NumericsError: the model produced NaN.
        """
        ids, lengths = lesson.read, [len(q) for q in lesson.questions]
        branches, states = len(lengths), _States()
        room = len(ids) + max(lengths) + self.new_tokens
        with model.pool.lend(room) as read, model.pool.lend(room, branches) as cache:
            model.forward(torch.tensor([ids]), RowPlan(torch.arange(len(ids)), len(ids)), read, 0)
            cache.slot_keys[:, :, :, : len(ids)] = read.slot_keys[:, :, :, : len(ids)]
            cache.slot_values[:, :, :, : len(ids)] = read.slot_values[:, :, :, : len(ids)]
            cache.filled = len(ids)
            said: list[list[torch.Tensor]] = [[] for _ in lengths]
            rows = [list(q) for q in lesson.questions]
            column, going = min(lengths), set(range(branches))
            new = torch.tensor([q[:column] for q in lesson.questions])
            while going:
                plan = cache.tail(new.shape[1])
                plan.watcher = states if self.hidden else None
                logits = model.forward(new, plan, cache)[:, -1]
                for n in [n for n in going if column == len(rows[n])]:
                    said[n].append(logits[n])
                    rows[n].append(int(logits[n].argmax()))
                    if rows[n][-1] in model.stop_ids or len(said[n]) == self.new_tokens:
                        going.discard(n)
                new = torch.tensor([[row[column] if column < len(row) else row[-1]] for row in rows])
                column += 1
        out = []
        for n, (length, row) in enumerate(zip(lengths, rows, strict=True)):
            top, log_probs, log_rest = self._kept(torch.stack(said[n]).log_softmax(-1))
            hidden = states.of(n, len(row) - 1) if self.hidden else None
            out.append(Target(tuple(row[length:]), top, log_probs, log_rest, hidden))
        return out

    def _kept(self, log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = min(self.top or log_probs.shape[-1], log_probs.shape[-1])
        best, ids = log_probs.topk(count, dim=-1)
        rest = log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1)
        return ids.to(torch.int32).cpu(), best.cpu(), rest.cpu()


class _States(Watcher):
    """What leaves every layer but the last, seen where it enters the next."""

    def __init__(self) -> None:
        self._by_layer: dict[int, list[torch.Tensor]] = {}

    def enters(self, layer: int, plan: RowPlan, hidden: torch.Tensor) -> None:
        if layer:
            self._by_layer.setdefault(layer, []).append(hidden.to("cpu", torch.bfloat16))

    def of(self, branch: int, rows: int) -> torch.Tensor:
        """``[layers - 1, rows, width]`` of one branch's first rows."""
        found = [torch.cat([h[branch] for h in seen])[:rows] for _, seen in sorted(self._by_layer.items())]
        return torch.stack(found)


@dataclass(frozen=True, eq=False, slots=True)
class Branches:
    """Several questions with their answers behind one context, side by side; what all begin with is there once.

    Attributes:
        ids: ``[1, rows]`` int64; a row of an answer predicts the next token, so its last token has none.
        common: rows that all begin with.
        lengths: rows of each behind them.
        answers: tokens of each answer.
    """

    ids: torch.Tensor
    common: int
    lengths: tuple[int, ...]
    answers: tuple[int, ...]

    @classmethod
    def of(cls, questions: Sequence[tuple[int, ...]], answers: Sequence[tuple[int, ...]]) -> Branches:
        # rows that predict an answer are each branch's own
        shared = takewhile(lambda column: len(set(column)) == 1, zip(*(q[:-1] for q in questions), strict=False))
        common = len(list(shared)) if len(questions) > 1 else 0
        own = [q[common:] + a[:-1] for q, a in zip(questions, answers, strict=True)]
        ids = torch.tensor([[*questions[0][:common], *(i for row in own for i in row)]])
        return cls(ids, common, tuple(map(len, own)), tuple(map(len, answers)))

    @property
    def tail(self) -> torch.Tensor:
        """Rows whose logits count, branch by branch."""
        ends = accumulate(self.lengths, initial=self.common)
        next(ends)
        return torch.cat([torch.arange(end - n, end) for end, n in zip(ends, self.answers, strict=True)])

    def plan(self, behind: int) -> Packed:
        """The rows behind so many slots."""
        ahead = behind + self.common
        return side_by_side(self.lengths, ahead, torch.arange(behind, ahead))

    def answer_rows(self, logits: torch.Tensor, branch: int) -> torch.Tensor:
        """``[T, vocabulary]``: of the rows of `tail`, those that predict the branch's answer."""
        first = sum(self.answers[:branch])
        return logits[0, first : first + self.answers[branch]]
