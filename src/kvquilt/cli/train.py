"""`kvquilt train`: from documents to a writer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvquilt.cli.common import Device, Dtype, Json, Threads, settings_of
from kvquilt.cli.train_view import run
from kvquilt.errors import InputError


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
        bool,
        typer.Option("--published", help="The papers' recipe, where there is one; options below still have their say."),
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
    steps: Annotated[int | None, typer.Option(metavar="N", help="At most; --epochs may end it before.")] = None,
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
    apart_from: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK", help="Refuse data that holds a document of this task's evaluation; repeatable."),
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
    from kvquilt.cli import training
    from kvquilt.training.begun import Begun
    from kvquilt.training.data import Sets
    from kvquilt.training.sources import Source

    start = None if begin_from is None else Begun.read(begin_from)
    if start is not None and start.alpha and alpha not in (None, start.alpha):
        raise InputError("alpha", f"the adapter that it begins from has {start.alpha}", alpha)
    chosen = training.configured(
        training.recipe(writer, published, start),
        {"rank": rank, "alpha": alpha, "header": header, "trailer": trailer, "links": links, "link_sets": link_sets,
         "every": every, "full_share": full_share,
         "targets": _list("targets", targets) if targets is not None else None},
        {"kl": kl, "ce": ce, "dense": dense, "temperature": temperature},
        {"fixed": _list("freeze", freeze) if freeze is not None else None, "lr": lr, "lr_soft": lr_soft,
         "epochs": epochs, "steps": steps, "batch": batch, "micro_batch": micro_batch, "normalise": normalise,
         "top": teacher_top, "keep_targets": keep_targets, "new_tokens": new_tokens, "shared_prefix": shared_prefix,
         "shuffle": shuffle, "checkpointing": checkpointing, "validate_every": validate_every, "seed": seed},
    )  # fmt: skip
    source = Source.parse(data)
    wanted = source.documents if documents is None else _numbers("documents", documents)
    drawing = Sets(wanted, questions, sets, held_out, validation_sets, seed)
    trainer = training.prepared(chosen, source, drawing, settings, out, validation, start, apart_from or ())
    trainer.save_every, trainer.targets = save_every, teacher
    run(trainer, json_output)
