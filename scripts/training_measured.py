"""What benchmarks/results says about trained writers and about training them, as sections of docs/results.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from methods_measured import method_of, table

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
Run = dict[str, Any]


def training_sections(folder: Path = RESULTS) -> list[str]:
    """A section per kind of result with every file of that kind; nothing where there is none."""
    lines: list[str] = []
    for kind, title, about, tables in _SECTIONS:
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{kind}-*.json"))]
        if runs:
            lines += ["", f"## {title}", "", about]
        for run in runs:
            lines += ["", *tables(run)]
    return lines


def _origin(run: Run, *facts: str) -> str:
    """Model or reader, facts, machine and command of one file."""
    threads = f"{run['threads']} thread{'s' * (run['threads'] != 1)}"
    machine = (threads, run["machine"], f"torch {run['torch']}", f"commit {run['commit']}")
    known = (run.get("model") or run.get("reader"), run.get("dtype"), *facts, *machine)
    return f"{', '.join(filter(None, known))}. `{run['command']}`"


def _number(row: Run, key: str, form: str, unit: str = "") -> str:
    value = row.get(key)
    return "-" if value is None else format(value, form) + unit


def _kl(row: Run) -> str:
    error = row.get("kl_standard_error")
    return _number(row, "mean_kl", ".3f") + ("" if error is None else f" ± {error:.3f}")


def _f1(row: Run) -> str:
    return _number(row, "micro_f1", ".3f") if "micro_f1" in row else _number(row, "micro_f1_to_full", ".3f", " to full")


def _arm(name: str) -> str:
    """As code, if it is a method as it is written, or one on a control's prompt."""
    return name if method_of(name) == "full" else f"`{name}`"


def _quality(run: Run) -> list[str]:
    facts = (
        f"{run['documents']} invented biographies and a question in {run['prompt_tokens']:.0f} tokens (median)",
        f"n = {run['n']}", f"seed {run['seed']}", f"BM25 finds the right one for {run['bm25_hit']:.0%}",
    )  # fmt: skip

    def place(arm: str) -> tuple[bool, bool, float]:
        return arm != "full", method_of(arm) != "full", run["arms"][arm].get("charged_share", 0.0)

    head = ["arm", "n", "micro-F1", "recovery", "charged", "mean KL", "p95 KL", "top-1", "first token"]
    rows = [
        [
            _arm(arm),
            str(row["n"]),
            _f1(row),
            _number(row, "recovery", ".2f"),
            _number(row, "charged_share", ".1%"),
            _kl(row),
            _number(row, "p95_kl", ".2f"),
            _number(row, "top1", ".2f"),
            _number(row, "first_token_ratio", ".1f", "x"),
        ]
        for arm, row in ((arm, run["arms"][arm]) for arm in sorted(run["arms"], key=place))
    ]
    return [_origin(run, *facts), "", *table(head, rows)]


def _domains(run: Run) -> list[str]:
    domains = list(run["n"])
    facts = (
        f"{run['documents']} documents per question", f"trained on {run['sets']} sets each", f"seed {run['seed']}",
        "n = " + ", ".join(f"{n} ({on})" for on, n in run["n"].items()),
    )  # fmt: skip
    rows = []
    for method, found in run["table"].items():
        trained = any(set(cells) & set(domains) for cells in found.values())
        for at, cells in found.items() if trained else [("-", found)]:
            measured = [cells.get(on, {}) for on in domains]
            rows.append([_arm(method), at, *map(_kl, measured), *map(_f1, measured)])
    head = ["arm", "trained on", *(f"{on}, mean KL" for on in domains), *(f"{on}, micro-F1" for on in domains)]
    return [_origin(run, *facts), "", *table(head, rows)]


def _study(run: Run) -> list[str]:
    bases = [(name, run[name]) for name in ("full", "none", "none behind the shared prefix") if name in run]
    head = ["without training", "micro-F1", "mean KL", "top-1"]
    rows = [[name, _number(b, "f1", ".3f"), _number(b, "kl", ".2g"), _number(b, "top1", ".3f")] for name, b in bases]
    lines = [_origin(run, f"n = {run['n']} questions"), "", *table(head, rows)]
    for study in dict.fromkeys(row["study"] for row in run["rows"]):
        mine = [row for row in run["rows"] if row["study"] == study]
        head = ["setting", "seeds", "samples", "questions per set", "micro-F1", "mean KL", "top-1", "recovery"]
        rows = []
        for name in dict.fromkeys(row["name"] for row in mine):
            seeds = [row for row in mine if row["name"] == name]
            rows.append(
                [
                    name,
                    str(len(seeds)),
                    *(
                        ", ".join(dict.fromkeys(str(row.get(key, "-")) for row in seeds))
                        for key in ("samples", "questions")
                    ),
                    _over(seeds, "f1", ".3f"),
                    _over(seeds, "kl", ".2g"),
                    _over(seeds, "top1", ".3f"),
                    _over(seeds, "recovery", ".3f"),
                ]
            )
        lines += ["", f"### Study: {study}", "", *table(head, rows)]
    return lines


def _over(rows: Iterable[Run], key: str, form: str) -> str:
    """Mean over seeds, and least and most of them where they differ as written."""
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        return "-"
    mean, least, most = (format(v, form) for v in (statistics.fmean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} to {most})"


def _memory(run: Run) -> list[str]:
    head = [
        "sets",
        "questions each",
        "peak",
        "checkpointed",
        "ratio",
        "kept",
        "checkpointed",
        "ratio",
        "processor time",
    ]
    rows = [
        [
            str(row["batch"]),
            str(row["questions"]),
            *(
                cell
                for what in ("peak_mb", "kept_mb")
                for cell in (
                    *(_number(row.get(arm) or {}, what, ".0f", " MB") for arm in ("direct", "checkpointed")),
                    _number(row, f"{what}_ratio", ".2f"),
                )
            ),
            _number(row, "cpu_seconds_ratio", ".2f", "x"),
        ]
        for row in run["rows"]
    ]
    return [_origin(run, f"{run['documents']} documents in a set", "one run of each"), "", *table(head, rows)]


def _speed(run: Run) -> list[str]:
    head = ["questions", "tokens", "rows", "GFLOP", "writer", "reader", "loss", "backward", "step", "per question"]
    head += ["checkpointed", "teacher"]
    stages = ("writer_seconds", "reader_seconds", "loss_seconds", "backward_seconds", "step_seconds")
    rows = [
        [
            *(_number(row, key, ".0f") for key in ("questions", "document_tokens", "reader_rows", "gflop")),
            *(_number(row, key, ".2f", " s") for key in (*stages, "seconds_per_question")),
            _number(row, "checkpointed_seconds_ratio", ".2f", "x"),
            _number(row, "teacher_seconds", ".1f", " s"),
        ]
        for row in run["rows"]
    ]
    facts = (f"one set of {run['documents']} documents", f"medians of {run['rounds']} rounds")
    lines = [_origin(run, *facts), "", *table(head, rows)]
    for name, shares in run.items():
        if name.startswith("share_of_time_with_"):
            most = ", ".join(f"`{operation}` {share:.1%}" for operation, share in list(shares.items())[:4])
            lines += ["", f"Of the time with {name.removeprefix('share_of_time_with_').replace('_', ' ')}: {most}."]
    return lines


_KL = "KL in nats per answer token to full prefill along its own answer, with the standard error over prompts"
_SECTIONS = (
    (
        "writer-quality",
        "Trained writers: answers",
        f"Micro-F1 of short answers; recovery: (F1 - none) / (full - none); {_KL}; first token: how many times sooner "
        "than full prefill, the median. `full prefill of the best k` reads only what BM25 ranks first.",
        _quality,
    ),
    (
        "writer-domains",
        "Trained writers: other documents than they were trained on",
        f"Every writer is trained on every kind of documents and measured on all. {_KL}. Where there are no gold "
        "answers, F1 is to full prefill's own answer.",
        _domains,
    ),
    (
        "writer-study",
        "Trained writers: settings, on a small reader",
        "A reader trained for one task, whose answers are one word. Means over seeds, which draw weights and data, and "
        "the least and the most. Recovery: (F1 - none) / (full - none). One seed is one draw: it tells settings apart "
        "only where they lie far apart.",
        _study,
    ),
    (
        "training-memory",
        "Memory of a training step",
        "Peak of resident memory over what the process held before the step; kept: the most that autograd held at "
        "once. Beside each, with KV gradient checkpointing; processor time: with it over without it.",
        _memory,
    ),
    (
        "training-speed",
        "Time of a training step",
        "Processor seconds, summed over threads, of one set of documents. Checkpointed: a step with KV gradient "
        "checkpointing over one without. The teacher's answers are kept, so its time is paid once per run.",
        _speed,
    ),
)
