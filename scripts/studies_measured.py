"""What benchmarks/results says of studies, of hit rates and of attention, as sections of docs/results.md."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from methods_measured import RESULTS, table

from kvquilt.evaluation.studies.repair_budget_text import remarks, study_tables

Found = dict[str, Any]


def study_sections(folder: Path = RESULTS) -> list[str]:
    """A section per study with every file of it; nothing where there is none."""
    lines: list[str] = []
    for pattern, title, about, told in _STUDIES:
        files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern), key=_stem)]
        if files:
            lines += ["", f"## {title}", "", about]
        for found in files:
            lines += ["", *told(found)]
    return lines


def _stem(path: Path) -> str:
    """What files are in order of: the plain one before its variants."""
    return path.stem


def _hit_rate(found: Found) -> list[str]:
    traffic, of = found["traffic"], found["of"]
    arms = list(dict.fromkeys(arm["arm"] for row in found["rows"] for arm in row["arms"]))
    rows = []
    for row in found["rows"]:
        rates = {arm["arm"]: f"{arm['token_hit_rate']:.1%}" for arm in row["arms"]}
        about = (row["documents"], row["exponent"], row["per_request"], f"{row['capacity_bytes'] / 1e9:g} GB")
        rows.append([*map(str, about), *(rates.get(arm, "-") for arm in arms)])
    orders = " and ".join(dict.fromkeys(row["order"] for row in found["rows"]))
    stamp = traffic["stamp_seconds"]
    lines = [
        f"Cache of {of['name']}, {found['bytes_per_token']} bytes a token; {traffic['requests']} requests, documents "
        f"in {orders} order, a stamp that changes every {stamp:g} second{'s' * (stamp != 1)}, seed {traffic['seed']}; "
        f"{found['machine']}, commit {found['commit']}. `{found['command']}`",
        "",
        *table(["documents", "exponent", "in a prompt", "memory", *(f"`{arm}`" for arm in arms)], rows),
    ]
    if replay := found.get("replay"):
        lines += [
            "",
            f"The same through a real model ({replay['model']}, {replay['requests']} requests, "
            f"{replay['prompt_tokens']} tokens): {replay['real']:.2%} of the tokens and {replay['real_evictions']} "
            f"evictions; in the simulator {replay['simulated']:.2%} and {replay['evictions']}.",
        ]
    return lines


def _attention(found: Found) -> list[str]:
    about = found["about"]
    facts = (
        f"`{about['task']}` on {about['model']}", about["dtype"], f"split `{about['split']}`", f"seed {about['seed']}",
        about["machine"], f"commit {about['commit']}",
    )  # fmt: skip
    rows = []
    for arm in found["arms"]:
        first, *later = arm["density"]
        known = [each for each in later if each is not None]
        ratio = arm["ratio"]["raw"]
        figures = (
            ratio["front"], ratio["interior"], first, statistics.fmean(known) if known else None,
            arm["nrmse"], arm["cosine"], arm["mass"],
        )  # fmt: skip
        count = f"{arm['items']} ({arm['refused']} refused)" if arm["refused"] else str(arm["items"])
        cells = ("-" if each is None else f"{each:.3g}" for each in figures)
        rows.append([f"`{arm['method']}`", count, *cells, f"{arm['seen']:.0%}"])
    head = ["arm", "items", "R_front", "R_int", "T_1", "T_2..8", "NRMSE", "cosine", "mass", "seen"]
    lines = [f"{', '.join(facts)}. `{about['command']}`", "", *table(head, rows)]
    return lines + [f"\nNot measured: `{name}`: {reason}." for name, reason in found["refused"].items()]


def _repair_budget(found: Found) -> list[str]:
    about, lines = found["about"], []
    for each in study_tables(found):
        lines += [f"*{each.title}*", "", *table(list(each.head), [list(row) for row in each.rows]), ""]
        lines += [line for note in each.notes for line in (note, "")]
    return [
        f"{about['model']}, {about['dtype']}, {about['threads']} threads, {about['machine']}, commit "
        f"{about['commit']}. "
        f"`{about['command']}`",
        "",
        *lines,
        *(line for said in remarks(found) for line in (said, "")),
    ][:-1]


_STUDIES = (
    (
        "hit-rate*.json",
        "Study: tokens that need not be computed",
        "Token hit rates of prefix caching and of reuse by segment, simulated ([what is held, and what is a hit]"
        "(studies.md)). Documents are asked for by Zipf's law with the exponent; `unbounded` holds everything that was "
        "ever asked for.",
        _hit_rate,
    ),
    (
        "attention-*.json",
        "Study: what reuse does to attention",
        "Against full prefill, from the rows that answer ([every column](studies.md)). R: difference of a token's "
        "weight over that under `none`, in a document's first tenth and in its interior. T: weight of a document's "
        "first tokens over that of one in its interior. NRMSE, cosine, mass: what is retrieved from a document. These "
        "numbers explain; they do not rank methods.",
        _attention,
    ),
    (
        "repair-budget-*.json",
        "Study: what reuse damages, and what mends it",
        "Answers lost and distances to full prefill by what stands beside the document that answers, and where a small "
        "budget is best spent ([every word](studies.md)).",
        _repair_budget,
    ),
)
