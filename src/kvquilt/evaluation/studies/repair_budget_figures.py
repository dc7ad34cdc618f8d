"""From the folders of a study of the repair budget to its figures. Nothing is computed anew."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvquilt.evaluation.figures.summarising import summarise
from kvquilt.evaluation.figures.summary import ArmSummary, Summary
from kvquilt.evaluation.run.arms import FULL, WITHOUT
from kvquilt.evaluation.run.folder import Line
from kvquilt.evaluation.studies.interference import PLACES
from kvquilt.evaluation.studies.repair_budget_arms import CONTEXT_CLAIMS, NONE, chosen_of, moved, rivals
from kvquilt.evaluation.studies.repair_budget_claims import adjust, claim
from kvquilt.evaluation.studies.repair_budget_folders import Measured, read_settings
from kvquilt.evaluation.studies.repair_budget_settings import ARMS, DISTANCES, PARTS
from kvquilt.evaluation.studies.target_hits import hit_rates

_SIDES = ("keys", "values")


def figures(folder: Path) -> dict[str, Any]:
    """What a study has found so far, ready for JSON.

    ``structure`` (and its cells taken together, ``margins``), ``attribution``, ``budget``, ``context``, ``retrieval``:
    lists, empty where a part was not measured;
    ``unfinished``: settings that are begun and not done, of which nothing is said; ``refused``: arms by setting that
    failed a control, and why; ``about``: model, command, versions and machine of the first setting.

    Raises:
        InputError: no study is there.
        IntegrityError: a folder is damaged.
    """
    found, unfinished = read_settings(folder)
    by_part = {part: [each for each in found if each.study["part"] == part] for part in PARTS}
    budget, context = _budget(by_part["budget"]), _context(by_part["context"])
    for part in (budget, context):
        adjust([each for row in part for each in row["claims"]])
    cells = sorted((_cell(each) for each in by_part["structure"]), key=_in_order)
    return {
        "structure": cells,
        "margins": list(_margins(cells)),
        "attribution": [_attributed(each) for each in by_part["attribution"]],
        "budget": budget,
        "context": context,
        "retrieval": [{"of": each.study["of"], **hit_rates(each.lines)} for each in by_part["retrieval"]],
        "unfinished": unfinished,
        "refused": {each.name: dict(each.refused) for each in found if each.refused},
        "about": next((_common(each) for each in found), {}),
    }


def _common(each: Measured) -> dict[str, Any]:
    return {
        name: value for name, value in each.about.items() if name not in ("task", "split", "score", "system", "study")
    }


def arm_row(arm: ArmSummary) -> dict[str, Any]:
    """What is said of an arm: distance, answers, damage, work; None for what was not measured."""
    row: dict[str, Any] = {"arm": arm.method, "items": arm.items, "refused": arm.refused}
    if arm.fidelity is not None:
        row |= {"kl": asdict(arm.fidelity.kl), "top1": arm.fidelity.own.top1, "kl_recovery": arm.fidelity.kl_recovery}
    if arm.scored is not None:
        row |= {"score": arm.scored.score.value, "right": arm.scored.right}
        if arm.scored.damage is not None:
            row |= {key: value for key, value in asdict(arm.scored.damage).items() if key != "accuracy"}
        if arm.scored.shares is not None and arm.scored.shares.damage is not None:
            row["damage_interval"] = [arm.scored.shares.damage.low, arm.scored.shares.damage.high]
    if arm.work is not None:
        row |= {"charged": arm.work.charged, "reused": arm.work.reused}
    return row


def _summary(each: Measured) -> tuple[Summary, dict[str, dict[str, Any]]]:
    summary = summarise(each.finished)
    return summary, {arm.method: arm_row(arm) for arm in summary.arms}


def _head(each: Measured, summary: Summary) -> dict[str, Any]:
    helped = summary.documents_help
    return {
        "of": each.study["of"],
        "items": summary.items,
        "documents_help": None if helped is None else asdict(helped),
        "tokens": statistics.fmean(line["prompt"]["tokens"] for line in each.lines if line["method"] == FULL),
    }


def _cell(each: Measured) -> dict[str, Any]:
    summary, arms = _summary(each)
    cell = {key: each.study[key] for key in ("structure", "distractors", "place")}
    return {**_head(each, summary), **cell, "arms": list(arms.values())}


def _in_order(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return cell["of"], cell["structure"], cell["distractors"], PLACES.index(cell["place"])


def _margins(cells: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Pure reuse over all cells of a structure, and within each over those of one place or one number of distractors.

    Questions of D are counted together; a cell's KL counts as much as any other's.
    """
    for key in ("structure", "place", "distractors"):
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for cell in cells:
            none = next((arm for arm in cell["arms"] if arm["arm"] == NONE and "kl" in arm), None)
            if none is not None and (cell["distractors"] or key == "structure"):
                groups.setdefault((cell["of"], cell["structure"], cell[key]), []).append(none)
        for (of, structure, value), rows in groups.items():
            base = sum(row.get("base", 0) for row in rows)
            lost = sum(row["base"] * row["damage"] for row in rows if row.get("base"))
            yield {
                "of": of, "structure": structure, "by": key, "value": value, "cells": len(rows), "base": base,
                "damage": lost / base if base else None, "kl": statistics.fmean(row["kl"]["value"] for row in rows),
            }  # fmt: skip


def _attributed(each: Measured) -> dict[str, Any]:
    """``curve``: a point for each number of documents that were given full prefill's rows; means over the draws."""
    summary, arms = _summary(each)
    points: dict[int, list[dict[str, Any]]] = {0: [arms[NONE]]} if NONE in arms else {}
    for name, given in each.study["given"].items():
        if name in arms:
            points.setdefault(given, []).append(arms[name])
    curve = [
        {
            "given": given,
            "draws": len(rows),
            "kl": statistics.fmean(row["kl"]["value"] for row in rows),
            "damage": _mean([row.get("damage") for row in rows]),
        }
        for given, rows in sorted(points.items())
    ]
    return {**_head(each, summary), "base": arms.get(NONE, {}).get("base"), "curve": curve}


def _budget(found: Sequence[Measured]) -> list[dict[str, Any]]:
    tuned = {each.name.rsplit("/", 1)[0]: each for each in found if each.study["split"] == "tuning"}
    rows = []
    for each in found:
        if each.study["split"] == "tuning":
            continue
        summary, arms = _summary(each)
        budget, tuning = each.study["budget"], tuned.get(each.name.rsplit("/", 1)[0])
        choice = None if tuning is None else _chosen(tuning)
        against = rivals(budget, None if choice is None else choice["arm"])
        best = moved(budget)
        claims = [claim(each, name, best, arm) for name, arm in against.items() if {best, arm} <= arms.keys()]
        rows.append(
            {**_head(each, summary), "budget": budget, "chosen": choice, "arms": list(arms.values()), "claims": claims}
        )
    return rows


def _chosen(tuning: Measured) -> dict[str, Any]:
    """The token selector of least KL on the tuning split. Where one was refused, it mends nothing: pure reuse's KL."""
    by_arm: dict[str, dict[str, Line]] = {}
    for line in tuning.lines:
        by_arm.setdefault(line["method"], {})[line["item"]] = line
    none = by_arm[NONE]
    kl, refused = {}, {}
    for name, lines in by_arm.items():
        if name not in (FULL, WITHOUT):
            served = [none[item] if line["refused"] else line for item, line in lines.items()]
            kl[name] = statistics.fmean(value for line in served for value in line["fidelity"]["self"]["kl"])
            refused[name] = sum(line["refused"] is not None for line in lines.values())
    candidates = {
        name: tuple(arms) for name, arms in tuning.study["candidates"].items() if all(arm in kl for arm in arms)
    }
    if not candidates:
        return {"name": None, "arm": None, "items": len(none), "kl": {}, "refused": refused, "none": kl[NONE]}
    name, means = chosen_of(kl, candidates)
    return {
        "name": name, "arm": candidates[name][0], "items": len(none), "kl": means, "refused": refused, "none": kl[NONE]
    }  # fmt: skip


def _context(found: Sequence[Measured]) -> list[dict[str, Any]]:
    rows = []
    apart = {each.name.rsplit("/", 1)[0]: each for each in found if each.study["measures"] == DISTANCES}
    for each in found:
        if each.study["measures"] != ARMS:
            continue
        summary, arms = _summary(each)
        claims = [
            claim(each, f"{one} against {other}", one, other)
            for one, other in CONTEXT_CLAIMS
            if {one, other} <= arms.keys()
        ]
        distances = apart.get(each.name.rsplit("/", 1)[0])
        rows.append(
            {
                **_head(each, summary),
                "arms": list(arms.values()),
                "claims": claims,
                "distances": None if distances is None else _distances(distances.lines),
            }
        )
    return rows


def _distances(lines: Sequence[Line]) -> dict[str, Any]:
    """Means over items by arm, side and measure, a number for each layer; None where an arm never ran."""
    made: dict[str, Any] = {}
    for name in lines[0]["arms"]:
        ran = [line["arms"][name] for line in lines if "refused" not in line["arms"][name]]
        made[name] = {
            side: {
                measure: [statistics.fmean(layer) for layer in zip(*(each[side][measure] for each in ran), strict=True)]
                for measure in ("l2", "cosine")
            }
            for side in _SIDES
        } if ran else None  # fmt: skip
    return made


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
