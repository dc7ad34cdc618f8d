"""`kvquilt train`: from documents to a writer."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvquilt.cli.common import Device, Dtype, Json, Threads, progress, settings_of
from kvquilt.cli.train_view import run
from kvquilt.errors import InputError

log = logging.getLogger(__name__)
if TYPE_CHECKING:
    from kvquilt.config import Settings
    from kvquilt.training.begun import Begun
    from kvquilt.training.config import TrainConfig
    from kvquilt.training.data import Sets
    from kvquilt.training.sources import Source
    from kvquilt.training.trainer import Trainer

_Options = dict[str, Any]


def _list(name: str, written: str) -> tuple[str, ...]:
    found = tuple(each.strip() for each in written.split(",") if each.strip())
    if not found:
        raise InputError(name, "name at least one", written)
    return found


def _numbers(name: str, written: str) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in _list(name, written))
    except ValueError:
        raise InputError(name, "whole numbers, such as 4 or 2,3,5", written) from None


def train(
    context: typer.Context,
    writer: Annotated[
        str, typer.Option(metavar="KIND", help="sempic, kv-packet, joint, link-tokens, encoder or block-tuned.")
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="DIR or file with documents, FILE.jsonl, task:biography, task:hotpotqa=PATH or task:help-topics.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the writer, its log and its curve go.")],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="By default the model of the settings.")] = None,
    published: Annotated[
        bool, typer.Option("--published", help="The papers' recipe; options below still have their say.")
    ] = False,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Of the adapter; 0 for none.")] = None,
    alpha: Annotated[float | None, typer.Option(metavar="X", help="The adapter's scaling times its rank.")] = None,
    targets: Annotated[
        str | None, typer.Option(metavar="A,B", help="Linear layers it is on: q_proj,k_proj,v_proj,o_proj.")
    ] = None,
    links: Annotated[int | None, typer.Option(metavar="N", help="Link tokens behind a document.")] = None,
    link_sets: Annotated[
        int | None, typer.Option(metavar="N", help="1, or as many as documents: each place has its own.")
    ] = None,
    every: Annotated[
        int | None, typer.Option(metavar="N", help="Decoder layers per layer of the encoder and cross layer.")
    ] = None,
    full_share: Annotated[
        float | None, typer.Option(metavar="W", help="A tuned reader's loss under the full mask, from 0 to 1.")
    ] = None,
    header: Annotated[int | None, typer.Option(metavar="N", help="Soft tokens before a document.")] = None,
    trailer: Annotated[int | None, typer.Option(metavar="N", help="Soft tokens behind it.")] = None,
    begin_from: Annotated[
        Path | None, typer.Option("--from", metavar="WRITER", help="Begin with the parts of a trained writer.")
    ] = None,
    freeze: Annotated[
        str | None, typer.Option(metavar="A,B", help="Parts that are not trained, such as adapter or header.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(metavar="X", help="Of all but soft tokens and gates; falls linearly to 0.")
    ] = None,
    lr_soft: Annotated[float | None, typer.Option(metavar="X", help="Of soft tokens and gates.")] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="End earlier.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Sets of documents per step.")] = None,
    micro_batch: Annotated[int | None, typer.Option(metavar="N", help="Of them, computed at a time.")] = None,
    kl: Annotated[float | None, typer.Option(metavar="W", help="Weight of the KL to full prefill.")] = None,
    ce: Annotated[float | None, typer.Option(metavar="W", help="Weight of the cross-entropy of its answer.")] = None,
    dense: Annotated[float | None, typer.Option(metavar="W", help="Weight of the hidden states' error.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="Of both distributions in the KL.")] = None,
    normalise: Annotated[str | None, typer.Option(metavar="HOW", help="token_mean or sum.")] = None,
    teacher_top: Annotated[
        int | None, typer.Option(metavar="K", help="Likeliest tokens kept per answer token; 0 for all.")
    ] = None,
    keep_targets: Annotated[
        bool | None, typer.Option(help="Keep the teacher's answers on disk, or ask again at every step.")
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where they are kept; runs over the same data may share it. By default in --out."
        ),
    ] = None,
    new_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest answer of the teacher.")] = None,
    shared_prefix: Annotated[
        bool | None, typer.Option(help="Encode documents behind the opening of the prompts, or alone.")
    ] = None,
    shuffle: Annotated[bool | None, typer.Option(help="The student sees documents in another order.")] = None,
    checkpointing: Annotated[bool | None, typer.Option(help="Less memory, more time.")] = None,
    documents: Annotated[
        str | None, typer.Option(metavar="N,M", help="Documents in a set; several numbers take turns.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, metavar="N", help="Questions about a set.")] = 4,
    sets: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Sets to train on; by default one per passage or line.")
    ] = None,
    held_out: Annotated[float, typer.Option(metavar="SHARE", help="Of the files, kept to validate on.")] = 0.1,
    validation_sets: Annotated[int, typer.Option(min=1, metavar="N", help="Sets to validate on.")] = 8,
    validation: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL with sets to validate on, instead of a share.")
    ] = None,
    validate_every: Annotated[int | None, typer.Option(metavar="N", help="Steps; 0 for the end only.")] = None,
    save_every: Annotated[int, typer.Option(min=1, metavar="N", help="Steps between two saved states.")] = 10,
    passage_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest passage in tokens.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of everything that is drawn.")] = 0,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Train a writer for MODEL on documents of your kind; the model itself stays as it is.

    No answers are needed: what the model says with everything in view teaches what is stored. From plain documents it
    writes the questions, too. The writer with the lowest KL on held-out documents is left in the folder, again
    whenever it gets better. Ctrl-C leaves a state; the same command goes on from there.
    """
    settings, _ = settings_of(
        context, model=model, passage_tokens=passage_tokens, dtype=dtype, device=device, threads=threads
    )
    from kvquilt.training.begun import Begun
    from kvquilt.training.sources import Source

    start = None if begin_from is None else Begun.read(begin_from)
    if start is not None and start.alpha and alpha not in (None, start.alpha):
        raise InputError("alpha", f"the adapter that it begins from has {start.alpha}", alpha)
    config = _config(
        _recipe(writer, published, start),
        {"rank": rank, "alpha": alpha, "header": header, "trailer": trailer, "links": links, "link_sets": link_sets,
         "every": every, "full_share": full_share,
         "targets": _list("targets", targets) if targets is not None else None},
        {"kl": kl, "ce": ce, "dense": dense, "temperature": temperature},
        {"fixed": _list("freeze", freeze) if freeze is not None else None, "lr": lr, "lr_soft": lr_soft,
         "epochs": epochs, "steps": steps, "batch": batch, "micro_batch": micro_batch, "normalise": normalise,
         "top": teacher_top, "keep_targets": keep_targets, "new_tokens": new_tokens, "shared_prefix": shared_prefix,
         "shuffle": shuffle, "checkpointing": checkpointing, "validate_every": validate_every, "seed": seed},
    )  # fmt: skip
    from kvquilt.training.data import Sets

    source = Source.parse(data)
    wanted = source.documents if documents is None else _numbers("documents", documents)
    drawing = Sets(wanted, questions, sets, held_out, validation_sets, seed)
    trainer = _trainer(config, source, drawing, settings, out, validation, start)
    trainer.save_every, trainer.targets = save_every, teacher
    run(trainer, json_output)


def _recipe(kind: str, published: bool, start: Begun | None) -> TrainConfig:
    """What holds where no option says otherwise."""
    from kvquilt.training import config as recipes

    base = recipes.published(kind) if published else recipes.own(kind)
    if start is None:
        return base
    return replace(base, shape=base.shape.sized(start), shared_prefix=base.shared_prefix or bool(start.prefix))


def _config(base: TrainConfig, shape: _Options, objective: _Options, others: _Options) -> TrainConfig:
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


def _given(options: _Options) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _trainer(
    config: TrainConfig,
    source: Source,
    sets: Sets,
    settings: Settings,
    out: Path,
    validation: Path | None,
    start: Begun | None,
) -> Trainer:
    """Everything in place, questions included; whatever can be wrong with the input is found before they are made."""
    from kvquilt.cli.work import passages_in, quiet_libraries
    from kvquilt.engine import SYSTEM
    from kvquilt.model.load import load_model
    from kvquilt.template import PromptTemplate
    from kvquilt.tokens import encoder
    from kvquilt.training.folder import RunFolder
    from kvquilt.training.sources import Reading
    from kvquilt.training.trainer import Trainer
    from kvquilt.training.world import World

    quiet_libraries()
    world = World.found()
    place = str(world.device) if world.device is not None else settings.device
    model = load_model(settings.model, settings.dtype, place, settings.threads, settings)
    if start is not None and start.base != model.fingerprint:
        log.warning("%s is of another model than %s: its parts are a start, no more", start.base_name, model.name)
    config.shape.drawn(model, config.seed)  # refuses a model that has no place for them
    template = PromptTemplate(model.tokenizer, SYSTEM if source.system is None else source.system)
    encode = encoder(model.tokenizer).encode
    around = config.shape.rows * max(sets.documents)
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
        ).read(source, validation)  # fmt: skip
    named = None if start is None else start.named
    return Trainer(model, template, config, data.exercises, data.held_out, out, start=named, world=world)
