"""What benchmarks/results says about methods, as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvquilt.repair.presets import METHODS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_LIMITS = (0.05, 0.15, 0.30, 1.0)
_NAMED = 4  # arms named in a cell before the rest is counted


def results_of(kind: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The committed runs of one kind (``quality``, ``speed``), by file name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"repair-{kind}-*.json"))]


def method_of(arm: str) -> str:
    """The method that an arm of a result is of."""
    return "full" if arm.startswith("full prefill of") else arm.partition(":")[0]


def origins(quality: list[dict[str, Any]], speed: list[dict[str, Any]]) -> list[str]:
    if not quality and not speed:
        return []
    lines = ["What the rows below were measured on:", ""]
    for run in quality:
        cells = ", ".join(f"{_cell(c)} (n = {d['n']}, {d['prompt_tokens']} tokens)" for c, d in run["cells"].items())
        lines.append(
            f"- Answers: {run['model']}, invented biographies (split `{run['split']}`, seed {run['seed']}): {cells}; "
            f"{_machine(run)}. Micro-F1 of short answers, beside it full prefill's; KL in nats per answer token, with "
            "the standard error over prompts, and top-1 agreement, against full prefill in the given order; first "
            "token: how many times sooner than full prefill."
        )
    lines += [
        f"- Time: {run['model']}, {run['tokens']} tokens in {run['documents']} documents, {run['dtype']}, "
        f"{_machine(run)}. Medians of {run['rounds']} rounds in which all arms took turns; only ratios within one run "
        "mean anything."
        for run in speed
    ]
    return lines


def _machine(run: dict[str, Any]) -> str:
    return f"{run['threads']} threads, {run['machine']}, commit {run['commit']}"


def _cell(name: str) -> str:
    documents, length = name.split("-")
    return f"{documents} {length} documents"


def measured(name: str, quality: list[dict[str, Any]], speed: list[dict[str, Any]]) -> list[str]:
    answers = [row for run in quality for row in _answers(name, run)]
    times = [row for run in speed for row in _times(name, run)]
    if not answers and not times:
        return ["**Measured.** Not measured yet."]
    lines = ["**Measured.**", ""]
    if answers:
        head = [
            "model, prompts",
            "arm",
            "n",
            "charged",
            "nominal",
            "micro-F1 (full)",
            "mean KL",
            "top-1",
            "first token",
        ]
        lines += [*table(head, answers), ""]
    if times:
        head = ["model, tokens", "arm", "charged", "first token", "choosing / full", "probe / full", "memory / slots"]
        lines += table(head, times)
    return lines


def _answers(name: str, run: dict[str, Any]) -> Iterator[list[str]]:
    for cell, data in run["cells"].items():
        full = data["arms"].get("full", {})
        for arm, row in data["arms"].items():
            if method_of(arm) != name:
                continue
            head = [f"{run['model']}, {_cell(cell)}", _code(arm)]
            if "micro_f1" not in row:
                yield [*head, "0", "the budget does not pay for the probe", *["-"] * 5]
                continue
            yield [
                *head,
                str(row["n"]),
                *(_number(row.get(key), ".1%") for key in ("charged_share", "nominal_share")),
                f"{row['micro_f1']:.2f}" + (f" ({full['micro_f1']:.2f})" if arm != "full" and full else ""),
                _kl(row),
                _number(row.get("top1"), ".2f"),
                f"{row['first_token_ratio']:.1f}x",
            ]


def _times(name: str, run: dict[str, Any]) -> Iterator[list[str]]:
    for arm, row in run["arms"].items():
        if method_of(arm) == name:
            yield [
                f"{run['model']}, {row.get('prompt_tokens', run['tokens'])}",
                _code(arm),
                _number(row.get("charged_share"), ".1%"),
                f"{row['full_over_method']:.2f}x",
                *(_number(row.get(key), ".1%") for key in ("choosing_over_full", "probe_over_full")),
                _number(row.get("peak_memory_over_slots"), ".2f"),
            ]
    for arm, reason in run.get("refused", {}).items():
        if method_of(arm) == name:
            yield [f"{run['model']}, {run['tokens']}", f"`{arm}`", f"refused: {reason}", *["-"] * 4]


def _code(arm: str) -> str:
    """As code, if it is a method as it is written."""
    return f"`{arm}`" if arm.partition(":")[0] in METHODS else arm


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _kl(row: dict[str, Any]) -> str:
    if "mean_kl" not in row:
        return "-"
    error = row.get("kl_standard_error")
    return f"{row['mean_kl']:.2f}" + ("" if error is None else f" ± {error:.2f}")


def which(quality: list[dict[str, Any]]) -> list[str]:
    """What came closest to full prefill for what it was charged, and what cannot be told apart from it."""
    if not quality:
        return ["Nothing of this has been measured yet on this project's own machines: measure on yours."]
    lines = [
        "What came closest to full prefill at most at that price, on the prompts below. It was picked from many on the "
        "very items that it is reported on, so its figure flatters it; what lies within two standard errors is named "
        "beside it and may be as good."
    ]
    for run in quality:
        for cell, data in run["cells"].items():
            arms = data["arms"]
            rows = [row for limit in _LIMITS if (row := _closest(arms, limit)) is not None]
            lines += ["", f"{run['model']}, {_cell(cell)} (n = {data['n']}):", ""]
            lines += table(
                ["charged at most", "closest", "charged", "mean KL", "micro-F1", "not told apart", "`random`"], rows
            )
            scored = {
                arm: row for arm, row in arms.items() if "micro_f1" in row and arm != "full" and not row["refused"]
            }
            if scored:
                best = max(scored, key=lambda arm: (scored[arm]["micro_f1"], -scored[arm].get("charged_share", 0.0)))
                lines += ["", f"Highest micro-F1: {_code(best)}, {scored[best]['micro_f1']:.2f}."]
                lines[-1] += f" Full prefill: {arms['full']['micro_f1']:.2f}."
    return lines


def _closest(arms: dict[str, dict[str, Any]], limit: float) -> list[str] | None:
    able = {a: r for a, r in arms.items() if "mean_kl" in r and r["charged_share"] <= limit and not r["refused"]}
    if not able:
        return None
    best = min(able, key=lambda arm: (able[arm]["mean_kl"], arm))
    near = [a for a, r in able.items() if a != best and _together(r, able[best])]
    more = f" and {len(near) - _NAMED} more" if len(near) > _NAMED else ""
    plain = [a for a in able if method_of(a) == "random" and "=" not in a]
    random = max(plain, key=lambda arm: able[arm]["charged_share"], default=None)
    return [
        f"{limit:.0%}",
        f"`{best}`",
        f"{able[best]['charged_share']:.1%}",
        _kl(able[best]),
        f"{able[best]['micro_f1']:.2f}",
        ", ".join(f"`{arm}`" for arm in sorted(near, key=lambda arm: able[arm]["mean_kl"])[:_NAMED]) + more or "-",
        "-" if random is None else f"{_kl(able[random])} at {able[random]['charged_share']:.1%}",
    ]


def _together(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two means differ by less than two standard errors of their difference, taken as unpaired."""
    errors = [row.get("kl_standard_error") for row in (one, other)]
    if any(error is None for error in errors):
        return True
    return bool(abs(one["mean_kl"] - other["mean_kl"]) <= 2 * sum(e * e for e in errors) ** 0.5)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
