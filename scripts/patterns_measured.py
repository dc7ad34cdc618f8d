"""What was published about reuse against what benchmarks/results says, point by point, as a section of docs/results.md.

Published patterns, never published numbers: other models, a hundredth of their size here. Verdicts are by intervals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evaluation_measured import Run, runs_of
from methods_measured import RESULTS, table

from kvquilt.evaluation.figures.statistics import Interval
from kvquilt.evaluation.figures.table import interval
from kvquilt.evaluation.run.arms import FEWER, find_arm
from kvquilt.evaluation.studies.repair_budget_arms import NONE
from kvquilt.evaluation.studies.target_hits import BM25, DENSITY, MASS

Row = dict[str, Any]
Said = tuple[str, str]  # what is found, and whether it agrees
_ABOUT = (
    "Patterns that were published for models of 3 to 14 billion parameters on GPUs, and whether they stand here. "
    "Numbers are not compared, only their order. *agrees* and *does not agree* are by 95 % intervals or tests; "
    "*not told apart* where neither holds."
)


def pattern_section(folder: Path = RESULTS) -> list[str]:
    """Nothing where none of the files is there."""
    found = ((published, look(folder)) for published, look in _PATTERNS)
    rows = [[published, *said] for published, said in found if said is not None]
    return ["", "## Published patterns", "", _ABOUT, "", *table(["published", "here", ""], rows)] if rows else []


def _none_collapses(folder: Path) -> Said | None:
    found = [(run, arm) for run, arm in _scored(folder, "none")]
    lost = [run for run, arm in found if _difference(arm).high < 0]
    told = "; ".join(f"`{run.task}` {interval(_difference(arm), signed=True)}" for run, arm in found)
    return _counted(f"to full: {told}", len(lost), len(found)) if found else None


def _fewer_documents(folder: Path) -> Said | None:
    """No published pattern: the control that answers whether reuse is worth having."""
    won, lost, total = [], [], 0
    for run in runs_of(folder):
        for arm in run.summary["arms"] if run.scores else ():
            fewer = (arm["scored"] or {}).get("fewer")
            if fewer is None or not find_arm(arm["method"]).is_method:
                continue
            total += 1
            won += [f"`{arm['method']}` on `{run.task}`"] * (fewer["outcome"] == "win")
            lost += [arm["method"]] * (fewer["outcome"] == "loss")
    if not total:
        return None
    which = f": {', '.join(won)}" if won else ""
    text = (
        f"{len(won)} of {total} methods and tasks beat `{FEWER}:K` at about equal time{which}; {len(lost)} are beaten"
    )
    return text, "see the tables"


def _trained_order(folder: Path) -> Said | None:
    """On the domain that the writers were trained on."""
    run = next((run for run in runs_of(folder) if run.task.startswith("biography") and run.scores), None)
    names = ("none", "kv-packet", "sempic", "joint")
    if run is None or any((run.arms.get(name) or {}).get("scored") is None for name in names):
        return None
    levels = [run.arms[name]["scored"]["score"]["value"] for name in names]
    told = ", ".join(f"`{name}` {interval(Interval(**run.arms[name]['scored']['score']))}" for name in names)
    near = [_difference(run.arms[name]).low <= 0 <= _difference(run.arms[name]).high for name in names[2:]]
    order = levels == sorted(levels) and _difference(run.arms["none"]).high < 0
    return f"`biography`: {told}; full {interval(Interval(**run.arms['full']['scored']['score']))}", (
        "agrees" if order and all(near) else "does not agree"
    )


def _by_structure(folder: Path) -> Said | None:
    told, agree = [], []
    for study in _studies(folder):
        margins = [row for row in study["margins"] if row["by"] == "structure" and row["damage"] is not None]
        for of in dict.fromkeys(row["of"] for row in margins):
            by = {row["structure"]: row for row in margins if row["of"] == of}
            told.append(
                f"`{of}`: " + ", ".join(f"{name} {row['damage']:.0%} of {row['base']}" for name, row in by.items())
            )
            if {"I1", "I2"} <= by.keys():
                agree.append(by["I2"]["damage"] > by["I1"]["damage"])
    return _counted("; ".join(told), sum(agree), len(agree)) if agree else None


def _spread(folder: Path) -> Said | None:
    """Half of the distractors mended takes away less than two thirds of the distance that all of them do."""
    told, agree = [], []
    for row in (row for study in _studies(folder) for row in study["attribution"]):
        curve = {point["given"]: point["kl"] for point in row["curve"]}
        if 0 not in curve:
            continue  # pure reuse could not be measured, so there is nothing to take away from
        most, half = max(curve), max(given for given in curve if given <= max(curve) / 2)
        whole = curve[0] - curve[most]
        if half and whole > 0:
            share = (curve[0] - curve[half]) / whole
            told.append(f"`{row['of']}`: {half} of {most} take away {share:.0%} of the KL that all of them do")
            agree.append(share < 2 / 3)
    return _counted("; ".join(told), sum(agree), len(agree)) if agree else None


def _claims(part: str, claim: str, better: str) -> Callable[[Path], Said | None]:
    """One claim over all settings of a part: right answers in D, and KL."""

    def look(folder: Path) -> Said | None:
        found = [
            (row["of"], each) for study in _studies(folder) for row in study[part] for each in row["claims"]
            if each["claim"] == claim and each["kl_p"] is not None
        ]  # fmt: skip
        if not found:
            return None
        told = "; ".join(
            f"`{of}`: right in D {each['only_arm']} to {each['only_against']} (p {each['p']:.2g}), KL "
            f"{each['kl_difference']:+.3f} (p {each['kl_p']:.2g})"
            for of, each in found
        )
        won = sum(each["kl_difference"] < 0 and each["kl_p"] < 0.05 for _, each in found)
        lost = sum(each["kl_difference"] > 0 and each["kl_p"] < 0.05 for _, each in found)
        verdict = f"{better} in {won} of {len(found)}" + (f", the other way in {lost}" if lost else "")
        return told, verdict

    return look


def _retrieval(folder: Path) -> Said | None:
    rows = [row for study in _studies(folder) for row in study["retrieval"] if row["items"]]
    told = "; ".join(
        f"`{row['of']}`: " + ", ".join(f"{name} {hit:.0%}" for name, hit in row["hit@1"].items()) for row in rows
    )
    agree = [row["hit@1"][BM25] > max(v for name, v in row["hit@1"].items() if name in (MASS, DENSITY)) for row in rows]
    return _counted(told, sum(agree), len(agree)) if rows else None


def _attention(folder: Path) -> Said | None:
    """Ratios to documents encoded alone, the papers' pure reuse, where a study has them: ours stand behind the opening.

    Small: below a quarter; about 1: from two thirds to one and a half.
    """
    told, checks = [], []
    for study in (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("attention-*.json"))):
        arms = {arm["method"]: arm["distance"]["raw"] for arm in study["arms"] if arm["items"]}
        if not {"kv-packet", "sempic"} <= arms.keys():
            continue
        against = next((name for name in (f"{NONE}:writer=isolated", NONE) if name in arms), None)
        if against is None:
            continue
        front, inside = (
            {name: arms[name][region] / arms[against][region] for name in ("kv-packet", "sempic")}
            for region in ("front", "interior")
        )
        packet, sempic = inside["kv-packet"], inside["sempic"]
        told.append(
            f"`{study['about']['task']}`, to `{against}`: `kv-packet` {front['kv-packet']:.3g} in front, {packet:.3g} "
            f"inside, `sempic` {front['sempic']:.3g} and {sempic:.3g}"
        )
        checks += [front["kv-packet"] < 1 / 4, 2 / 3 < packet < 3 / 2, sempic < packet]
    return _counted("; ".join(told), sum(checks), len(checks)) if told else None


_PATTERNS: tuple[tuple[str, Callable[[Path], Said | None]], ...] = (
    ("Pure reuse loses answers (KV Packet's files, the damage study)", _none_collapses),
    ("`none` < `kv-packet` < `sempic` <= `joint`, the last two at full prefill (SemPIC)", _trained_order),
    ("Reuse loses more with distractors of the target's own type (I2) than with neutral ones (I1)", _by_structure),
    ("Mending a few distractors hardly helps; damage is spread over them", _spread),
    (
        "Computing the target again on the reused cache beats inserting its full-prefill KV",
        _claims("context", "recompute:target against insert:target", "recomputing is nearer"),
    ),
    ("A retriever finds the target far more often than question attention on the reused cache", _retrieval),
    (
        "5 % on the retrieved document, moved last, beats the best token selector (QA, API docs; not dialogue)",
        _claims("budget", "the chosen token selector", "the document is nearer"),
    ),
    (
        "It beats reordering by question attention",
        _claims("budget", "reordering by question attention", "the document is nearer"),
    ),
    (
        "A packet's attention errs little in front (R_front small) and as much as pure reuse inside (R_int about 1), "
        "SemPIC's less there",
        _attention,
    ),
    ("Reuse has to beat full prefill of fewer documents (our own control)", _fewer_documents),
)


def _counted(text: str, agree: int, total: int) -> Said:
    verdict = "agrees" if agree == total else "does not agree" if not agree else f"agrees in {agree} of {total}"
    return text, verdict


def _scored(folder: Path, name: str) -> Iterator[tuple[Run, Row]]:
    for run in runs_of(folder):
        if run.scores and (run.arms.get(name) or {}).get("scored"):
            yield run, run.arms[name]


def _difference(arm: Row) -> Interval:
    return Interval(**arm["scored"]["difference"])


def _studies(folder: Path) -> list[Row]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("repair-budget-*.json"))]
