"""All arms on one item: their answers, their scores, and how far their distributions are from full prefill's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from kvquilt.errors import InputError
from kvquilt.evaluation.run.arms import FULL, Arm
from kvquilt.evaluation.run.config import RunConfig
from kvquilt.evaluation.run.folder import Line
from kvquilt.evaluation.run.standing import Standing, answers, force, reading
from kvquilt.evaluation.tasks.grading import FORMS, GRADERS, Metric
from kvquilt.evaluation.tasks.item import Item
from kvquilt.evaluation.tasks.metrics import bag_counts, bare, is_marked
from kvquilt.fidelity import distances
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.placement import place_runs
from kvquilt.tokens import encoder

if TYPE_CHECKING:
    from kvquilt.engine import Engine

_AT_ONCE = 2 << 30  # bytes of caches that wait to answer together
_FORCED = 8  # prompts at once: every row's log-probabilities are as many as the vocabulary


@dataclass(frozen=True, eq=False, slots=True)
class Truth:
    """Full prefill on one item.

    Attributes:
        said: the head of its own greedy answer, along which arms are compared.
        own, gold: log-probabilities ``[rows, vocabulary]`` before each token of `said` and of the accepted answer.
    """

    said: tuple[int, ...]
    own: torch.Tensor = field(repr=False)
    gold: torch.Tensor = field(repr=False)


@dataclass(frozen=True, eq=False, slots=True)
class Sounder:
    """Makes the lines of a run, item by item."""

    engine: Engine
    config: RunConfig
    tenant: str | None

    def lines(
        self,
        arms: Sequence[Arm],
        item: Item,
        ranking: Sequence[int],
        other: Item | None = None,
        told: Callable[[Arm], object] = lambda arm: None,
    ) -> list[Line]:
        """A line for each arm. Prompts are read one by one; then all of them answer together, which costs far less.

        Where a method cannot run on this prompt, the line says why in ``refused`` and has no answer.

        Args:
            arms: full prefill is the first.
            ranking: indices of the item's documents, the retriever's best first.
            other: whose documents a deranged arm has.
            told: of every arm whose prompt has been read.

        Raises:
            NumericsError: the model produced NaN.
        """
        gold = gold_ids(self.engine, item)
        made: dict[str, Line] = {}
        truth: Truth | None = None
        waiting: dict[str, Standing] = {}
        with ExitStack() as held:
            for arm in arms:
                made[arm.name], prompt = self._read(held, arm, item, ranking, made, other, len(gold))
                told(arm)
                if prompt is not None:
                    waiting[arm.name] = prompt
                if arm is arms[-1] or sum(each.cache.nbytes for each in waiting.values()) >= _AT_ONCE:
                    truth = self._ask(waiting, made, item, gold, truth)
                    waiting.clear()
                    held.close()
        return list(made.values())

    def _read(
        self,
        held: ExitStack,
        arm: Arm,
        item: Item,
        ranking: Sequence[int],
        made: Mapping[str, Line],
        other: Item | None,
        least: int,
    ) -> tuple[Line, Standing | None]:
        began = perf_counter()
        documents = arm.documents(item, ranking, made, other)
        runs = self.engine.prompt(item.question, documents).runs(self.engine.model.tokenizer)
        order = arm.ranking(item, ranking, other)
        placement = place_runs(runs, arm.method.order, order, arm.method.moved)
        line: Line = {"item": item.id, "group": item.group, "method": arm.name, "refused": None}
        prompt_seconds, room = perf_counter() - began, max(self.config.new_tokens, least)
        try:
            self.engine.reader.check(placement, arm.method, self.tenant, room)
            read = reading(self.engine, placement, arm.method, self.tenant, room, arm.in_parts)
            prompt = held.enter_context(read)
        except InputError as error:
            if arm.name == FULL:
                raise
            nothing = dict.fromkeys(("answer", "tokens", "stop", "score", "right", "scores", "fidelity", "ledger"))
            return line | {"refused": str(error), **nothing, "seconds": {"prompt": prompt_seconds}}, None
        prompt.ledger.asked, prompt.ledger.seconds["prompt"] = arm.name, prompt_seconds
        ids = [i for run in runs for i in run.ids]
        line["ledger"] = prompt.ledger.as_dict()
        line["prompt"] = {
            "tokens": len(ids),
            "ids": digest_fields("kvquilt 2026-11 prompt v1", [("ids", encode_ids(ids))])[:32],
        }
        return line, prompt

    def _ask(
        self,
        waiting: Mapping[str, Standing],
        made: Mapping[str, Line],
        item: Item,
        gold: tuple[int, ...],
        truth: Truth | None,
    ) -> Truth:
        """Complete the lines of those that wait; the truth is made by full prefill, if it is among them."""
        speaking = [name for name in waiting if name not in self.config.silent]
        spoken = answers([waiting[name] for name in speaking], self.config.new_tokens)
        said = dict(zip(speaking, spoken, strict=True))
        head = truth.said if truth is not None else said[FULL][: self.config.self_tokens]
        names = list(waiting)
        for first in range(0, len(names), _FORCED):
            together = names[first : first + _FORCED]
            prompts = [waiting[name] for name in together]
            for name, own, accepted in zip(together, force(prompts, head), force(prompts, gold), strict=True):
                if truth is None:  # full prefill is the first
                    truth = Truth(head, own, accepted)
                nll = {"nll": _short(_nll(accepted, gold))}
                if name == FULL:
                    made[name]["fidelity"] = {"gold": nll}
                else:
                    made[name]["fidelity"] = {
                        "self": _compared(truth.own, own),
                        "gold": {**_compared(truth.gold, accepted), **nll},
                    }
        assert truth is not None
        for name, prompt in waiting.items():
            account = prompt.ledger.as_dict()
            seconds = account.pop("seconds")
            made[name].update({**self._answered(said.get(name), item), "ledger": account, "seconds": seconds})
        return truth

    def _answered(self, said: tuple[int, ...] | None, item: Item) -> Line:
        if said is None:
            return dict.fromkeys(("answer", "tokens", "stop", "score", "right", "scores"))
        model, metric = self.engine.model, self.config.metric
        ended = said[-1] in model.stop_ids
        text: str = model.tokenizer.decode(
            said[: len(said) - ended], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return {
            "answer": text,
            "tokens": list(said),
            "stop": "end" if ended else "length",
            "score": metric.score(text, item.answers),
            "right": metric.is_right(text, item.answers),
            "scores": all_scores(metric, text, item.answers),
        }


def gold_ids(engine: Engine, item: Item) -> tuple[int, ...]:
    """The canonical answer's tokens as they would follow the prompt, and the end token, if the model has one."""
    tokenizer = engine.model.tokenizer
    # a chat template opens the answer's line; without one the prompt ends in "Answer:"
    answer = item.answers[0] if tokenizer.chat_template else f" {item.answers[0]}"
    stops = engine.model.stop_ids
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in stops else min(stops, default=None)
    return encoder(tokenizer).encode(answer) + (() if end is None else (end,))


def all_scores(metric: Metric, prediction: str, answers: Sequence[str]) -> dict[str, Any]:
    """Every score of one item by name, of the task's form of a prediction; `micro_f1_bag` as its three counts."""
    form = FORMS[metric.form]
    said = form(prediction)
    counts = bag_counts(prediction, answers, bare if metric.form == "whole" else form)
    out: dict[str, Any] = {name: grade(said, answers) for name, grade in GRADERS.items()}
    out["micro_f1_bag"] = [counts.tp, counts.fp, counts.fn]
    if metric.form == "marked":
        out["marked"] = is_marked(prediction)
    return out


def _compared(full: torch.Tensor, arm: torch.Tensor) -> dict[str, list[float]]:
    kl, agree = distances(full, arm)
    return {"kl": _short(kl), "agree": agree.tolist()}


def _nll(rows: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    return -rows.gather(1, torch.tensor(ids, device=rows.device)[:, None])[:, 0]


def _short(values: torch.Tensor) -> list[float]:
    """Six digits, which is all that fp32 means."""
    return [float(f"{value:.6g}") for value in values.tolist()]
