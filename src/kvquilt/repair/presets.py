"""Methods by name: each is a row of parts, never a class of its own.

A method is written ``NAME``, or ``NAME:OPTION,OPTION``, where an option is a budget (``15%``) or ``field=value`` for a
field of its selector, for ``writer`` or for ``order``: ``epic:k=16``, ``cacheblend:15%,writer=isolated``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvquilt.errors import InputError, nearest
from kvquilt.placement import Order
from kvquilt.repair.ape import Tempered
from kvquilt.repair.budget import Budget
from kvquilt.repair.correction import Correction
from kvquilt.repair.everything import Everything
from kvquilt.repair.first_tokens import FirstTokens
from kvquilt.repair.helper_model import HelperModel
from kvquilt.repair.kept_blocks import KeptBlocks
from kvquilt.repair.kv_deviation import KVDeviation
from kvquilt.repair.layer_band import LayerBand
from kvquilt.repair.mean_shift import MeanShift
from kvquilt.repair.nothing import Nothing
from kvquilt.repair.plan import PostProcessor
from kvquilt.repair.post import CapRuns, Expand, MergeGap, Quota, RoundToBlock
from kvquilt.repair.question_attention import QuestionAttention
from kvquilt.repair.random_rows import Random
from kvquilt.repair.retrieved_document import RetrievedDocument
from kvquilt.repair.selector import Selector
from kvquilt.repair.spread import Spread
from kvquilt.repair.stored_attention import StoredAttention
from kvquilt.repair.written import number, split, value_like, with_option, without_budget
from kvquilt.writers.recipes import check_recipe

POST: dict[str, Callable[[Any], PostProcessor]] = {  # each is made from one number
    "expand": Expand,
    "round_to_block": RoundToBlock,
    "merge_gap": MergeGap,
    "cap_runs": CapRuns,
    "quota": Quota,
}


@dataclass(frozen=True, slots=True)
class Method:
    """One preset.

    Attributes:
        summary: what the command line says about it.
        writer: the recipe of its documents; "" for the engine's own.
        budget: what it may spend; None: whatever its selector names.
        post: applied to what was chosen, in this order.
    """

    name: str
    order: Order
    selector: Selector
    summary: str
    budget: Budget | None = None
    writer: str = ""
    post: tuple[PostProcessor, ...] = ()
    correction: Correction | None = None

    def __post_init__(self) -> None:
        if self.order is Order.SHARED_POSITIONS and not isinstance(self.selector, Nothing):
            raise InputError(
                "order", "rows computed again cannot share positions: each sees those before it", self.name
            )

    @property
    def reuses(self) -> bool:
        return not isinstance(self.selector, Everything)

    @property
    def moved(self) -> int:
        """How many of the retriever's best documents `target_last` moves."""
        return self.selector.documents if isinstance(self.selector, RetrievedDocument) else 1

    @property
    def needs_ranking(self) -> bool:
        """Whether the documents must be ranked for the question."""
        return isinstance(self.selector, RetrievedDocument) or self.order is Order.TARGET_LAST

    def within(self, budget: object) -> Method:
        """The same with another budget (see `Budget.parse`); None leaves it as it is."""
        if budget is None:
            return self
        given = Budget.parse(budget)
        if not self.reuses:
            raise InputError("budget", "full prefill computes everything and takes no budget", str(given))
        return dataclasses.replace(self, budget=given, name=with_option(without_budget(self.name), str(given)))


INFOFLOW = QuestionAttention(layers=(-2, -1), softmax_over="documents+question", reduce_rows="l2")
METHODS = {
    m.name: m
    for m in (
        Method("full", Order.GIVEN, Everything(), "full prefill: the truth, no reuse"),
        Method("none", Order.GIVEN, Nothing(), "pure reuse: cheapest, changes answers"),
        Method(
            "retrieved-document",
            Order.TARGET_LAST,
            RetrievedDocument(),
            "the best-ranked document moves next to the question and is recomputed; the others are reused",
        ),
        Method("epic", Order.GIVEN, FirstTokens(), "the first 16 tokens of every document are recomputed"),
        Method(
            "random", Order.GIVEN, Random(), "random rows are recomputed: what others must beat", Budget(share=0.15)
        ),
        Method("spread", Order.GIVEN, Spread(), "evenly spaced rows are recomputed", Budget(share=0.15)),
        Method(
            "droidspeak",
            Order.GIVEN,
            LayerBand(),
            "all rows are recomputed in the first half of the layers; deeper ones keep what is stored",
        ),
        Method(
            "ape",
            Order.SHARED_POSITIONS,
            Nothing(),
            "documents stand side by side, attention to them is sharpened and scaled; nothing is recomputed",
            correction=Tempered(),
        ),
        Method(
            "agentkvshift",
            Order.GIVEN,
            Spread(),
            "evenly spaced rows are recomputed; the rest of each document moves by their mean change",
            Budget(share=0.15),
            correction=MeanShift(),
        ),
        Method(
            "cacheblend",
            Order.GIVEN,
            KVDeviation(),
            "rows whose values deviate most at layer 1 are recomputed: about 15% of them, and the check of all of them",
            # the check costs a little more than one layer of all rows, whatever the model's depth
            Budget(share=0.20),
        ),
        Method(
            "cacheblend-gradual",
            Order.GIVEN,
            KVDeviation(gradual=0.5),
            "as cacheblend, but each layer passes on fewer rows, those that deviate most there",
            Budget(share=0.20),
        ),
        Method(
            "prophetkv",
            Order.GIVEN,
            QuestionAttention(),
            "rows that the question attends to, over all layers, are recomputed; the probe counts towards the 20%",
            Budget(share=0.20),
        ),
        Method(
            "a3",
            Order.GIVEN,
            QuestionAttention(layers=(0,)),
            "rows that the question attends to at layer 0 are recomputed; the paper's own layers and ratio are unknown",
            Budget(share=0.15),
        ),
        Method(
            "fusionrag",
            Order.GIVEN,
            QuestionAttention(context_share=0.0, layers=(-1,)),
            "documents are encoded behind similar ones; rows that the question attends to in the last layer, having "
            "seen no document before, are recomputed",
            Budget(share=0.15),
            writer="neighbours",
        ),
        Method(
            "cache-craft",
            Order.GIVEN,
            StoredAttention(),
            "documents are encoded where they once stood; rows that looked at other documents there are recomputed, "
            "as many as the new order asks for",
            writer="in-situ",
        ),
        Method(
            "qcfuse",
            Order.GIVEN,
            QuestionAttention(context_share=0.15, around=0.55, softmax_over="all"),
            "the question reads a digest of each document up to the middle layers; rows that it attends to there are "
            "recomputed. Which layers, the paper says for its own models only",
            Budget(share=0.5),
            writer="digest",
        ),
        Method(
            "infoflow",
            Order.GIVEN,
            INFOFLOW,
            "rows that the question attends to in the last two layers are recomputed; the probe counts towards the 15%",
            Budget(share=0.15),
        ),
        Method(
            "infoflow-reorder",
            Order.DENSITY_ASCENDING,
            INFOFLOW,
            "as infoflow, once documents with more of such rows stand nearer to the question; two probes",
            Budget(share=0.15),
        ),
        Method(
            "samkv",
            Order.GIVEN,
            KeptBlocks(),
            "blocks that the question attends to are recomputed, the others dropped from attention",
            Budget(share=0.15),
        ),
        Method(
            "cacheclip",
            Order.GIVEN,
            HelperModel(),
            "groups of 8 tokens that a second, small model attends to are recomputed; its work counts towards the 20%",
            Budget(share=0.20),
        ),
        Method(
            "kv-packet",
            Order.GIVEN,
            Nothing(),
            "documents are encoded between a trained header and trailer; only the question is computed",
            writer="kv-packet",
        ),
        Method(
            "sempic",
            Order.GIVEN,
            Nothing(),
            "documents are encoded with a trained adapter on; the reader is untouched; only the question is computed",
            writer="sempic",
        ),
        Method(
            "joint",
            Order.GIVEN,
            Nothing(),
            "documents are encoded between a trained header and trailer, with a trained adapter on; only the question "
            "is computed",
            writer="joint",
        ),
        Method(
            "link-tokens",
            Order.GIVEN,
            Nothing(),
            "documents are encoded as without training; trained tokens behind each, which see all earlier ones, are "
            "computed with the question",
            writer="link-tokens",
        ),
        Method(
            "encoder",
            Order.GIVEN,
            Nothing(),
            "documents go through a trained encoder and are seen by trained cross-attention layers; they take no rows",
            writer="encoder",
        ),
    )
}
AUTO_ORDER = ("retrieved-document", "none")  # what `auto` tries, first to last, before full prefill


@lru_cache(maxsize=256)
def _made(written: str) -> Method:
    name, options = split(written)
    if name == "auto":
        raise InputError("method", "auto runs what was measured and takes no options; name a method", written)
    if name not in METHODS:
        raise InputError("method", f"unknown method {name!r}{nearest(name, [*METHODS, 'auto'])}")
    method = METHODS[name]
    for option in options:
        field, equals, value = option.partition("=")
        method = _with(method, field.strip(), value.strip()) if equals else method.within(option)
    return dataclasses.replace(method, name=written)


def find_method(name: object) -> Method:
    """The method that `name` describes.

    Raises:
        InputError: unknown name or option, or no name at all; the message gives the nearest.
    """
    if not isinstance(name, str):
        raise InputError("method", f"unknown method {name!r}{nearest(name, [*METHODS, 'auto'])}")
    return _made(name)


def options_of(part: object) -> dict[str, Any]:
    """What can be set of a selector, correction or post-processor, and its value."""
    if not dataclasses.is_dataclass(part):
        return {}
    declared = ("probe", "granularity")
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.name not in declared}


def _with(method: Method, field: str, value: str) -> Method:
    """The method with one option set."""
    if field == "writer":
        check_recipe(value)
        return dataclasses.replace(method, writer=value)
    if field == "order":
        if value not in tuple(Order):
            raise InputError("order", f"unknown order {value!r}{nearest(value, map(str, Order))}")
        return dataclasses.replace(method, order=Order(value))
    if field in POST:
        made = POST[field](number("post", field, value))  # one number each
        return dataclasses.replace(method, post=(*method.post, made))
    held: dict[str, Any] = {"selector": method.selector, "correction": method.correction}
    for role, part in held.items():
        if field in (now := options_of(part)):
            changed = dataclasses.replace(part, **{field: value_like(now[field], field, value)})
            return dataclasses.replace(method, **{role: changed})
    known = [*(name for part in held.values() for name in options_of(part)), "writer", "order", *POST]
    raise InputError("method", f"{method.name} has no option {field!r}{nearest(field, known)}")
