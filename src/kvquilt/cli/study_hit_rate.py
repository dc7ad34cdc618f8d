"""`kvquilt study hit-rate`: how many tokens need not be computed, by simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvquilt.cli.common import ModelFlag, echo_table, settings_of
from kvquilt.cli.lists import names_in, numbers_in
from kvquilt.cli.measuring import told_by_option
from kvquilt.cli.watching import watching
from kvquilt.errors import InputError

if TYPE_CHECKING:
    from kvquilt.config import Settings
    from kvquilt.evaluation.studies.hit_rate_replay import Replayed

_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "of", "requests", "documents", "exponent", "per_request", "order", "systems", "system_tokens", "stamp_tokens",
        "stamp_seconds", "question_tokens", "rate", "drift_every", "seed", "capacity", "arms", "bytes_per_token",
    )
} | {"mean": "--mean-tokens", "capacities": "--capacity"}  # fmt: skip


def hit_rate(
    context: typer.Context,
    of: Annotated[
        str, typer.Option(metavar="MODEL", help="Whose cache is held: llama-3.1-8b, qwen3-8b, ... or a model's folder.")
    ] = "llama-3.1-8b",
    bytes_per_token: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of its cache; by default two bytes a number.")
    ] = None,
    capacity: Annotated[str, typer.Option(metavar="A,B", help="Bytes of the cache, such as 30GB.")] = "30GB",
    exponent: Annotated[str, typer.Option(metavar="A,B", help="Of Zipf's law.")] = "0.6,0.8,1.0,1.2",
    documents: Annotated[str, typer.Option(metavar="A,B", help="Documents that are asked for.")] = "1000,5000",
    per_request: Annotated[str, typer.Option(metavar="A,B", help="Documents in a prompt.")] = "5",
    order: Annotated[
        str, typer.Option(metavar="A,B", help="shuffled, or stable: two always stand alike.")
    ] = "shuffled",
    arms: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="prefix, segments:POLICY (lru, lfu, store, gdsf, gdsf-work), ...:unbounded."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Requests.")] = 4000,
    rate: Annotated[float, typer.Option(metavar="X", help="Requests per second, arriving by chance.")] = 1.0,
    systems: Annotated[int, typer.Option(min=1, metavar="N", help="Different system prompts.")] = 4,
    system_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="Tokens of each.")] = 150,
    stamp_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="Tokens of the time stamp; 0: none.")] = 12,
    stamp_seconds: Annotated[float, typer.Option(metavar="X", help="It changes so often; 86400: a date.")] = 1.0,
    question_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a question.")] = 40,
    mean_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of a document; from 3/8 to 5/2 of it.")] = 800,
    drift_every: Annotated[
        int, typer.Option(min=0, metavar="N", help="Requests after which a tenth change their rank; 0: never.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of everything that is drawn.")] = 0,
    replay: Annotated[
        int, typer.Option(min=0, metavar="N", help="Read so many requests with MODEL, too: simulated against real.")
    ] = 0,
    model: ModelFlag = None,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw it there.")] = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write JSON there; - is stdout.")] = None,
) -> None:
    """Token hit rates of prefix caching and of reuse by segment, by simulation: no model, no GPU.

    A prompt is one of several system texts, a time stamp, documents by Zipf's law, a question. A prefix cache hits as
    far as a prompt begins as an earlier one did; by segments, every text that is held is a hit, wherever it stands.
    """
    from kvquilt.bench import environment, portable
    from kvquilt.cli.bench import check_output
    from kvquilt.evaluation.studies.hit_rate import ARMS
    from kvquilt.evaluation.studies.hit_rate_model import find_size
    from kvquilt.evaluation.studies.hit_rate_study import HitRateStudy, table
    from kvquilt.evaluation.studies.hit_rate_trace import Traffic
    from kvquilt.files import writing

    settings, _ = settings_of(context, model=model)
    exponents = numbers_in("--exponent", exponent, float)
    collections, counts = numbers_in("--documents", documents, int), numbers_in("--per-request", per_request, int)
    orders = names_in("--order", order)
    with told_by_option(**_OPTIONS):
        traffic = Traffic(
            requests, collections[0], exponents[0], counts[0], orders[0], systems, system_tokens,
            stamp_tokens, stamp_seconds, question_tokens, max(1, mean_tokens * 3 // 8), mean_tokens,
            mean_tokens * 5 // 2, rate, drift_every, seed,
        )  # fmt: skip
        study = HitRateStudy(
            traffic, find_size(of), exponents, collections, counts, orders,
            tuple(_bytes(each) for each in names_in("--capacity", capacity)),
            ARMS if arms is None else names_in("--arms", arms), bytes_per_token,
        )  # fmt: skip
    for option, path in (("--json", out), ("--plot", plot)):
        if path is not None and str(path) != "-":
            with told_by_option(**{"--json": option}):
                check_output(path)
    with told_by_option(**_OPTIONS), watching("simulating", "traces") as watch:
        result: dict[str, Any] = {**environment(), **study.run(watch)}
    reader = portable(settings.model)
    if replay:
        again = _replayed(settings, replay, seed)
        result["replay"] = {"model": reader, **again.as_dict()}
    if plot is not None:
        from kvquilt.evaluation.studies.hit_rate_plot import plot as draw_plot

        with writing(plot):
            plot.write_bytes(draw_plot(result))
    text = json.dumps(result, indent=1) + "\n"
    if str(out) == "-":
        typer.echo(text, nl=False)
        return
    echo_table(*table(result["rows"]))
    typer.echo(
        f"\nShare of all prompt tokens that need not be computed. A cache of {capacity} ({result['of']['name']}, "
        f"{result['bytes_per_token']:,} bytes a token), {requests:,} requests."
    )
    if replay:
        typer.echo(
            f"\nReplayed through {reader}: {again.requests} requests, simulated {again.simulated:.2%}, real "
            f"{again.real:.2%} of the tokens were there; {again.evictions} and {again.real_evictions} evictions."
        )
    if out is not None:
        with writing(out):
            out.write_text(text, encoding="utf-8")


def _replayed(settings: Settings, requests: int, seed: int) -> Replayed:
    from dataclasses import replace

    from kvquilt.cli.work import open_engine
    from kvquilt.evaluation.studies.hit_rate_replay import SMALL
    from kvquilt.evaluation.studies.hit_rate_replay import replay as replay_small

    with open_engine(settings) as engine, watching("replaying", "prompts") as watch:
        return replay_small(engine, replace(SMALL, requests=requests, seed=seed), progress=watch)


def _bytes(written: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(written))
    except ValidationError:
        raise InputError("--capacity", "must be a number of bytes, such as 30GB or 30GiB", written) from None
