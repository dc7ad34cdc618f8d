"""One arm on one item: its answer, its scores, and how far its distributions are from full prefill's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from kvquilt.errors import InputError
from kvquilt.evaluation.arms import Arm
from kvquilt.evaluation.grading import FORMS, GRADERS, Metric
from kvquilt.evaluation.item import Item
from kvquilt.evaluation.metrics import bag_counts, bare, is_marked
from kvquilt.evaluation.run_config import RunConfig
from kvquilt.evaluation.run_folder import Line
from kvquilt.evaluation.standing import Standing, reading
from kvquilt.fidelity import distances
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.placement import Placement, place_runs
from kvquilt.repair.presets import METHODS
from kvquilt.tokens import encoder

if TYPE_CHECKING:
    from kvquilt.engine import Engine


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
    """Makes the lines of a run."""

    engine: Engine
    config: RunConfig
    tenant: str | None

    def line(
        self,
        arm: Arm,
        item: Item,
        ranking: Sequence[int],
        earlier: Mapping[str, Line],
        truth: Truth | None,
        other: Item | None = None,
    ) -> tuple[Line, Truth]:
        """The arm's line and the item's truth, which full prefill's own line makes.

        Where a method cannot run on this prompt, the line says why in ``refused`` and has no answer.

        Args:
            ranking: indices of the item's documents, the retriever's best first.
            earlier: the item's lines so far by arm.
            truth: None for full prefill alone.
            other: whose documents a deranged arm has.

        Raises:
            NumericsError: the model produced NaN.
        """
        began = perf_counter()
        documents = arm.documents(item, ranking, earlier, other)
        runs = self.engine.prompt(item.question, documents).runs(self.engine.model.tokenizer)
        order = arm.ranking(item, ranking, other)
        placement = place_runs(runs, arm.method.order, order, arm.method.moved)
        line = {"item": item.id, "group": item.group, "method": arm.name, "refused": None}
        prompt_seconds = perf_counter() - began
        try:
            truth, found, seconds = self._measured(arm, item, placement, truth)
        except InputError as error:
            if truth is None:
                raise
            nothing = dict.fromkeys(("answer", "tokens", "stop", "score", "right", "scores", "fidelity", "ledger"))
            return line | {"refused": str(error), **nothing, "seconds": {"prompt": prompt_seconds}}, truth
        ids = [i for run in runs for i in run.ids]
        found["prompt"] = {
            "tokens": len(ids),
            "ids": digest_fields("kvquilt 2026-11 prompt v1", [("ids", encode_ids(ids))])[:32],
        }
        return line | found | {"seconds": {"prompt": prompt_seconds, **seconds}}, truth

    def again(self, item: Item, line: Line) -> Truth:
        """The truth once more, along the answer in full prefill's own line."""
        runs = self.engine.prompt(item.question, item.documents).runs(self.engine.model.tokenizer)
        gold = gold_ids(self.engine, item)
        with reading(self.engine, place_runs(runs), METHODS["full"], self.tenant, self._room(gold)) as prompt:
            return self._truth(prompt, tuple(line["tokens"]), gold)

    def _measured(
        self, arm: Arm, item: Item, placement: Placement, truth: Truth | None
    ) -> tuple[Truth, Line, dict[str, float]]:
        gold = gold_ids(self.engine, item)
        room = self._room(gold)
        self.engine.reader.check(placement, arm.method, self.tenant, room)
        with reading(self.engine, placement, arm.method, self.tenant, room, arm.in_parts) as prompt:
            said = None if arm.name in self.config.silent else prompt.answer(self.config.new_tokens)
            if truth is None:
                assert said is not None  # full prefill is never silent
                truth = self._truth(prompt, said, gold)
                fidelity = {"gold": {"nll": _short(_nll(truth.gold, gold))}}
            else:
                own, accepted = prompt.force(truth.said), prompt.force(gold)
                fidelity = {
                    "self": _compared(truth.own, own),
                    "gold": {**_compared(truth.gold, accepted), "nll": _short(_nll(accepted, gold))},
                }
        ledger = prompt.ledger
        ledger.asked = arm.name
        account = ledger.as_dict()
        seconds = account.pop("seconds")
        return truth, {**self._answered(said, item), "fidelity": fidelity, "ledger": account}, seconds

    def _truth(self, prompt: Standing, said: tuple[int, ...], gold: tuple[int, ...]) -> Truth:
        head = said[: self.config.self_tokens]
        return Truth(head, prompt.force(head), prompt.force(gold))

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

    def _room(self, gold: Sequence[int]) -> int:
        return max(self.config.new_tokens, len(gold))


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
