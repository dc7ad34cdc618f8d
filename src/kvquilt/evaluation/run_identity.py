"""What a run is a run of, and what its folder says of its items."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvquilt.context import check_prompt_fits
from kvquilt.errors import InputError
from kvquilt.evaluation.item import Item
from kvquilt.evaluation.run_config import RunConfig
from kvquilt.evaluation.sounding import gold_ids
from kvquilt.identity import digest_fields, encode_ids
from kvquilt.retrieval import ranked_documents
from kvquilt.tokens import encoder

if TYPE_CHECKING:
    from kvquilt.engine import Engine

log = logging.getLogger(__name__)


def identity(engine: Engine, items: Sequence[Item], config: RunConfig) -> dict[str, Any]:
    """Everything that the lines of a run depend on, as JSON gives it back.

    Raises:
        InputError: no items, two of one id, or answers that are all longer than one may be.
        ContextLengthError: an item's prompt and answer do not fit; names it.
    """
    if not items:
        raise InputError("items", "at least one is needed")
    if len({item.id for item in items}) < len(items):
        raise InputError("items", "no id may occur twice")
    _check_answers_fit(engine, items, config.new_tokens)
    model, helper = engine.model, engine.reader.helper
    return {
        "config": config.as_dict(),
        "items": digest_fields(
            "kvquilt 2026-11 items v1", [("item", _digest(engine, item, config.new_tokens)) for item in items]
        ),
        "model": model.fingerprint.digest,
        "threads": model.threads,
        "writer": engine.writer.digest,
        "trained writers": sorted(engine.reader.identities),
        "helper": None if helper is None else helper.fingerprint.digest,
    }


def described(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items as the folder keeps them, with the one ranking of their documents that all arms see."""
    return [
        {
            "item": item.id,
            "group": item.group,
            "task": item.task,
            "kind": item.kind,
            "documents": [document.id for document in item.documents],
            "gold": list(item.gold),
            "answers": list(item.answers),
            "ranking": ranked_documents(item.question, item.documents),
        }
        for item in items
    ]


def texts(items: Sequence[Item]) -> list[dict[str, Any]]:
    """What people wrote of the items, for those who read the results."""
    return [
        {
            "item": item.id,
            "question": item.question,
            "documents": [{"id": document.id, "text": document.text} for document in item.documents],
        }
        for item in items
    ]


def _digest(engine: Engine, item: Item, new_tokens: int) -> str:
    runs = engine.prompt(item.question, item.documents).runs(engine.model.tokenizer)
    try:
        check_prompt_fits(engine.model.capability, runs, max(new_tokens, len(gold_ids(engine, item))))
    except InputError as error:
        raise type(error)(f"items ({item.id}): {error.field}", error.rule, error.got) from None
    named: list[tuple[str, bytes | str | None]] = [("id", item.id), ("group", item.group), ("gold", str(item.gold))]
    named += [("prompt", encode_ids([i for run in runs for i in run.ids]))]
    named += [("answer", answer) for answer in item.answers]
    named += [("document", f"{document.score} {document.id}") for document in item.documents]
    return digest_fields("kvquilt 2026-11 item v1", named)


def _check_answers_fit(engine: Engine, items: Sequence[Item], new_tokens: int) -> None:
    """Whether an accepted answer of every item can be given whole; some scores count a part of it, too."""
    encode = encoder(engine.model.tokenizer).encode
    long = [item.id for item in items if min(len(encode(answer)) for answer in item.answers) > new_tokens]
    if len(long) == len(items):
        raise InputError("new_tokens", "no accepted answer of any item fits", new_tokens)
    if long:
        log.warning(
            "%d of %d items have no accepted answer that fits into %d tokens, %s the first of them",
            len(long), len(items), new_tokens, long[0],
        )  # fmt: skip
