"""What `kvquilt train` trains, made of its options."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvquilt.cli.common import progress, warn
from kvquilt.cli.work import passages_in, quiet_libraries
from kvquilt.config import Settings
from kvquilt.engine import SYSTEM
from kvquilt.errors import InputError
from kvquilt.evaluation.tasks.by_name import find_task
from kvquilt.evaluation.tasks.leakage import check_documents_apart, manifest
from kvquilt.model.load import load_model
from kvquilt.template import PromptTemplate
from kvquilt.tokens import encoder
from kvquilt.training import config as recipes
from kvquilt.training.begun import Begun
from kvquilt.training.components import Components
from kvquilt.training.config import TrainConfig
from kvquilt.training.data import Sets
from kvquilt.training.folder import RunFolder
from kvquilt.training.sources import Reading, Source
from kvquilt.training.trainer import Trainer
from kvquilt.training.world import World

log = logging.getLogger(__name__)
Options = Mapping[str, Any]


def recipe(kind: str, published: bool, start: Begun | None) -> TrainConfig:
    """What holds where no option says otherwise."""
    base = recipes.published(kind) if published else recipes.own(kind)
    if start is None:
        return base
    return replace(base, shape=base.shape.sized(start), shared_prefix=base.shared_prefix or bool(start.prefix))


def configured(base: TrainConfig, shape: Options, objective: Options, others: Options) -> TrainConfig:
    """The recipe with the options that were given."""
    there, sizes = asdict(base)["shape"], _given(shape)
    for name in sizes.keys() - there.keys():
        raise InputError(name, f"{base.kind} has none of that; it has {', '.join(there)}", sizes[name])
    return replace(
        base,
        shape=type(base.shape)(**{**there, **sizes}),
        objective=replace(base.objective, **_given(objective)),
        **_given(others),
    )


def _given(options: Options) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def prepared(
    config: TrainConfig,
    source: Source,
    sets: Sets,
    settings: Settings,
    out: Path,
    validation: Path | None,
    start: Begun | None,
    apart_from: Sequence[str],
) -> Trainer:
    """Everything in place, questions included; whatever can be wrong with the input is found before they are made.

    Raises:
        LeakageError: a document is one of those that a task of `apart_from` evaluates on.
    """
    refused = frozenset(d for task in apart_from for d in manifest(find_task(task).items("evaluation")))
    quiet_libraries()
    world = World.found()
    place = str(world.device) if world.device is not None else settings.device
    model = load_model(settings.model, settings.dtype, place, settings.threads, settings)
    if start is not None and start.base != model.fingerprint:
        log.warning("%s is of another model than %s: its parts are a start, no more", start.base_name, model.name)
    named = {} if start is None else start.named
    template = PromptTemplate(model.tokenizer, SYSTEM if source.system is None else source.system)
    Components.begun(model, config.shape, config.seed, named, config.trained)  # refuses what has no place
    config.shape.pupil(model, template.opening if config.shared_prefix else (), True)  # or cannot stand there
    encode = encoder(model.tokenizer).encode
    around = config.shape.rows * max(sets.documents)
    if world.main and not sys.stderr.isatty():
        warn("reading the data; of plain documents the model asks questions first, seconds for each passage")
    files = RunFolder(out)
    mine = files.held() if world.main else nullcontext()
    with world.first(), mine, progress("asking questions") as advance:
        data = Reading(
            model, template, sets,
            passages=lambda path: passages_in(path, settings, model.tokenizer),
            length=lambda text: len(encode(text)),
            limit=settings.passage_tokens,
            room=config.new_tokens + around,
            questions=files.questions,
            progress=advance,
            refused=refused,
        ).read(source, validation)  # fmt: skip
    sets_read = (*data.exercises, *data.held_out)
    check_documents_apart("data", [document for each in sets_read for document in each.documents], refused)
    return Trainer(model, template, config, data.exercises, data.held_out, out, start=named or None, world=world)
