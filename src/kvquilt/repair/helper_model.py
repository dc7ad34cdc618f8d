from __future__ import annotations

from dataclasses import dataclass

import torch

from kvquilt.errors import ContextLengthError, InputError, PromptError
from kvquilt.model.counter import RowCounter
from kvquilt.model.language_model import LanguageModel
from kvquilt.model.rows import RowPlan
from kvquilt.offsets import Rendering, carried_over, document_spans, render
from kvquilt.repair.attention_scores import Received
from kvquilt.repair.scene import Scene
from kvquilt.repair.selector import Choice, Granularity, Probe
from kvquilt.tokens import encoder


@dataclass(frozen=True, slots=True)
class HelperModel:
    """Rows that a second, small model attends to from the question, in groups of neighbours (CacheClip, 2510.10129).

    The helper prefills the same prompt in its own tokens. A token of the reader gets the largest attention among the
    helper's tokens that share a character with it, and then the mean of its group. The paper's group width, its way of
    joining heads and its mapping between tokenizers are not known; means over heads and question rows are ours.

    Charged are the helper's products with its weights, in units of one row through one layer of the reader, rounded
    up; its attention is not. Without a helper model it raises `InputError`, as for a prompt that the helper cannot
    take or align.

    Attributes:
        layer: of the helper whose attention counts; negative from the end.
        group: neighbouring tokens of one document that are ranked together.
    """

    layer: int = -1
    group: int = 8
    probe: Probe = Probe.HELPER
    granularity: Granularity = Granularity.BLOCK

    def __post_init__(self) -> None:
        if self.group < 1:
            raise InputError("group", "must be at least 1", self.group)

    def least(self, scene: Scene) -> int:
        helper = _helper(scene)
        if not scene.tokens:
            return 0
        tokens, layer = len(self._rendering(scene, helper).ids), self._layer(helper)
        return _charge(RowCounter(token_layers=tokens * (layer + 1), unfinished=tokens), helper, scene.model)

    def choose(self, scene: Scene) -> Choice:
        helper = _helper(scene)
        if not scene.tokens:
            return Choice(scene.slots)
        rendering, counter = self._rendering(scene, helper), RowCounter()
        tokens, layer = len(rendering.ids), self._layer(helper)
        seen = Received(_asking(scene, rendering), None, {layer}, "mean", "mean")
        plan = RowPlan(torch.arange(tokens), tokens, until=layer, queries=True, watcher=seen)
        with helper.pool.lend(tokens) as cache:
            helper.forward(torch.tensor([rendering.ids]), plan, cache, 0, counter)
        scene.besides += _charge(counter, helper, scene.model)
        attention = seen.scores
        parts = [self._scores(scene, rendering, helper, i, attention) for i in scene.spendable]
        return Choice(scene.ranked(torch.cat(parts)))

    def _layer(self, helper: LanguageModel) -> int:
        layers = helper.capability.layers
        if not -layers <= self.layer < layers:
            raise InputError("layer", f"the helper model {helper.name} has {layers} layers", self.layer)
        return self.layer % layers

    def _rendering(self, scene: Scene, helper: LanguageModel) -> Rendering:
        """The prompt in the helper's tokens, once it is known that it fits and that documents can be aligned."""
        runs = scene.placement.runs
        for i in scene.spendable:
            document_spans(runs[i], scene.model.tokenizer)
        try:
            rendering = render(runs, scene.model.tokenizer, helper.tokenizer)
        except PromptError as error:
            raise PromptError("helper_model", f"{helper.name} cannot read this prompt: {error}") from None
        over = len(rendering.ids) - helper.capability.max_length
        if over > 0:
            rule = (
                f"the prompt takes {len(rendering.ids)} of its tokens and {helper.name} has a context of "
                f"{helper.capability.max_length}: {over} too many; give fewer documents or another helper model"
            )
            raise ContextLengthError("helper_model", rule)
        return rendering

    def _scores(
        self, scene: Scene, rendering: Rendering, helper: LanguageModel, run: int, attention: torch.Tensor
    ) -> torch.Tensor:
        """``[tokens]`` of one document run: the means of its groups."""
        document, at = scene.placement.runs[run].document, rendering.spans[run]
        if document is None:
            raise ValueError("only documents are spendable")
        text = document.text + document.end
        ours = document_spans(scene.placement.runs[run], scene.model.tokenizer)
        theirs = encoder(helper.tokenizer).spans(text, document.tenant)[1]
        scores = carried_over(attention[at.start : at.stop], theirs, ours, len(text))
        return torch.cat([part.mean().expand(len(part)) for part in scores.split(min(self.group, max(1, len(scores))))])


def no_helper() -> InputError:
    """The error of a method without the model it asks; says how to give one."""
    rule = (
        "this method asks a second, small model, and there is none: give one with --helper-model, the setting "
        "helper_model, or Engine.load(..., helper=...)"
    )
    return InputError("helper_model", rule)


def _helper(scene: Scene) -> LanguageModel:
    if scene.helper is None:
        raise no_helper()
    return scene.helper


def _charge(counter: RowCounter, helper: LanguageModel, reader: LanguageModel) -> int:
    """The helper's rows in token-layers of the reader, by the weights that they pass."""
    passed = counter.charge(helper.projection_share) * helper.layer_weights * reader.capability.layers
    return -(-passed // (helper.capability.layers * reader.layer_weights))  # rounded up, in whole numbers


def _asking(scene: Scene, rendering: Rendering) -> torch.Tensor:
    """``[q]`` int64, the helper's rows that ask: those of the runs that `Scene.question` stands in.

    Where a document ends the prompt, its last row asks.
    """
    asking, rows = scene.question, []
    for i, (run, at) in enumerate(zip(scene.placement.runs, rendering.spans, strict=True)):
        span = scene.placement.span(i)
        if bool(((asking >= span.start) & (asking < span.stop)).any()):
            rows += list(at if run.document is None else at[-1:])
    return torch.tensor(rows or [len(rendering.ids) - 1])
