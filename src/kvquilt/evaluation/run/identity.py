"""What a run is a run of: what its lines depend on, and how its folder begins or is recognised."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvquilt.context import check_prompt_fits
from kvquilt.errors import InputError, IntegrityError
from kvquilt.evaluation.run.config import RunConfig, differences
from kvquilt.evaluation.run.folder import EvaluationFolder
from kvquilt.evaluation.run.line_forms import check_stored_items
from kvquilt.evaluation.run.sounding import gold_ids
from kvquilt.evaluation.tasks.item import Item
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
    check_items(items)
    _check_answers_fit(engine, items, config.new_tokens)
    digests = [("item", _digest(engine, item, config.new_tokens)) for item in items]
    return {
        "config": config.as_dict(),
        "items": digest_fields("kvquilt 2026-11 items v1", digests),
        **identity_of(engine),
    }


def identity_of(engine: Engine) -> dict[str, Any]:
    """What lines depend on beside items and settings."""
    model, helper = engine.model, engine.reader.helper
    return {
        "model": model.fingerprint.digest,
        "device": model.device.type,  # which one of several of a kind makes no difference
        "threads": model.threads,
        "writer": engine.writer.digest,
        "trained writers": sorted(engine.reader.identities),
        "helper": None if helper is None else helper.fingerprint.digest,
    }


def check_items(items: Sequence[Item]) -> None:
    """Raises `InputError`: no items, or two of one id."""
    if not items:
        raise InputError("items", "at least one is needed")
    twice = [name for name, count in Counter(item.id for item in items).items() if count > 1]
    if twice:
        raise InputError("items", "no id may occur twice", twice[0])


def prompt_ids(engine: Engine, item: Item, room: int) -> bytes:
    """The ids of an item's whole prompt, for its digest.

    Raises:
        ContextLengthError: they and `room` tokens more do not fit; names the item.
    """
    runs = engine.prompt(item.question, item.documents).runs(engine.model.tokenizer)
    try:
        check_prompt_fits(engine.model.capability, runs, room)
    except InputError as error:
        raise type(error)(f"items ({item.id}): {error.field}", error.rule, error.got) from None
    return encode_ids([i for run in runs for i in run.ids])


def begun(
    files: EvaluationFolder,
    run: Mapping[str, Any],
    about: Mapping[str, Any],
    items: Sequence[Item],
    controls: Callable[[], Mapping[str, Any]] = dict,
) -> dict[str, Any]:
    """The controls of the run in a folder, which somebody holds; without a run there, this one begins.

    Args:
        run: everything that its lines depend on, as JSON gives it back.
        about: what a reader should know; of a run that is there it stays as it was.
        controls: measured where the run begins, and kept.

    Raises:
        InputError: another run is there; names what differs.
        IntegrityError: the folder is damaged, or has lines and does not say of what.
        StoreUnavailableError: it cannot be written.
    """
    stored = files.read_run()
    if stored is None:
        if files.lines.exists():
            raise IntegrityError(f"{files.run} is missing")
        stored = {"run": run, "about": dict(about), "controls": controls()}
        files.write(stored, described(items), texts(items))
    elif differing := differences(run, _with_device(files, stored, run)):
        rule = f"holds another run: it differs in {', '.join(differing)}; choose another folder"
        raise InputError("folder", rule, str(files.path))
    return dict(stored["controls"])


def _with_device(files: EvaluationFolder, stored: Mapping[str, Any], run: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the run there is of. Early folders named the device among what a reader should know, earlier ones not."""
    there: Mapping[str, Any] = stored["run"]
    if "device" in there or "device" not in run:
        return there
    told = stored["about"].get("device")
    if told is None:
        log.warning("%s does not say on which device its lines were made; they are taken for this one's", files.run)
        return {**there, "device": run["device"]}
    return {**there, "device": str(told).partition(":")[0]}


def rankings(files: EvaluationFolder, items: Sequence[Item]) -> list[list[int]]:
    """The ranking of every item's documents that all arms see, as it was when the run began.

    Raises:
        IntegrityError: the folder is damaged, or has other items.
    """
    kept = files.read_items()
    check_stored_items(files.items, kept)
    if [each.get("item") for each in kept] != [item.id for item in items]:
        raise IntegrityError(f"{files.items}: not the items of this run")
    return [each["ranking"] for each in kept]


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
    prompt = prompt_ids(engine, item, max(new_tokens, len(gold_ids(engine, item))))
    named: list[tuple[str, bytes | str | None]] = [("id", item.id), ("group", item.group), ("gold", str(item.gold))]
    named += [("prompt", prompt)]
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
