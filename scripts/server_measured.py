"""What benchmarks/results says of the server, as a section of docs/results.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from methods_measured import RESULTS, table

Found = dict[str, Any]
Row = tuple[str, str, str, bool | None]  # what, measured, bar, whether it was met


def server_section(folder: Path = RESULTS) -> list[str]:
    """A row per figure, and where each file is from; nothing where there is none."""
    rows, origins = [], []
    for pattern, told in _FILES:
        for path in sorted(folder.glob(pattern)):
            found = json.loads(path.read_text(encoding="utf-8"))
            rows += [[f"{found['model']}, {found['dtype']}", *cells(row)] for row in told(found)]
            origins.append(
                f"`{path.name}`: {found['dtype']}, {found['threads']} thread{'s' * (found['threads'] != 1)}, "
                f"{found['machine']}, commit {found['commit']}, `{found['command']}`"
            )
    if not rows:
        return []
    head = ["model", "what", "measured", "bar", "met"]
    about = (
        "Servers of their own process on the loopback, asked by `benchmarks/server_*.py`. Streams gain less from "
        "decoding together in float32, whose products of a few rows cost far more than those of one, than where the "
        "processor has instructions for bfloat16; a tiny model's steps are mostly Python."
    )
    return ["", "## Server", "", about, "", *table(head, rows), "", *(f"- {each}" for each in origins)]


def cells(row: Row) -> list[str]:
    what, measured, bar, met = row
    return [what, measured, bar, "-" if met is None else "yes" if met else "**no**"]


def _load(found: Found) -> list[Row]:
    load, end, speed = found["load"], found["at_the_end"], found["throughput"]
    drift = load["memory_last_fifth_over_second"]
    left = sum(value for name, value in end.items() if name.startswith(("cache_bytes", "store_pinned")))
    disk = sum(value for name, value in end.items() if name.startswith("store_bytes") and 'tier="disk"' in name)
    asked = f"{load['clients']} streaming clients, {load['minutes']:g} minutes"
    return [
        ("tokens per second, 8 streams over one", f"{speed['ratio']:.2f}", ">= 3", speed["ratio"] >= 3),
        (asked, f"{load['answered']} answered, {load['hung up']} hung up on", "", None),
        ("errors among them", str(load["errors"]), "0", load["errors"] == 0),
        ("memory, last fifth over second", f"{drift:.3f}", "within 5 %", abs(drift - 1) <= 0.05),
        ("bytes of caches and pins left", f"{left:g}", "0", left == 0),
        (
            "bytes counted on disk over those listed", f"{disk / end['bytes_listed_on_disk']:.3f}", "1",
            disk == end["bytes_listed_on_disk"],
        ),
    ]  # fmt: skip


def _overhead(found: Found) -> list[Row]:
    spread, noise = found["difference"], found["library_to_itself"]
    apart = found["server"]["p99_ms"] - found["library"]["p99_ms"]
    within = f"{spread['p99_ms']:.1f} ms; the library's to itself {noise['p99_ms']:.1f} ms"
    return [
        ("first token, server less library, median", f"{spread['p50_ms']:.1f} ms", "<= 10 ms", spread["p50_ms"] <= 10),
        ("first token, 99 % of the server less 99 % of the library", f"{apart:.1f} ms", "<= 25 ms", apart <= 25),
        ("first token, 99 % of the differences within rounds", within, "", None),
    ]


def _reuse(found: Found) -> list[Row]:
    rate, keys = found["hit_rate"], found["keys"]
    late, early = rate["last_100"], rate["50_to_150"]
    more = keys["stored"] - keys["distinct_documents"]
    return [
        (f"document tokens found, last 100 of {found['queries']}", f"{late:.1%}", f">= {early:.1%}", late >= early),
        ("stored keys beyond distinct documents", str(more), "a constant", more <= 1),
    ]


def _faults(found: Found) -> list[Row]:
    rows: list[Row] = []
    for name, told in _FAULTS.items():
        each = found.get(name)
        if each is None or "skipped" in each:
            continue
        answers = [group for group in _groups(each) if "equal" in group]
        equal, refused, wrong = (sum(group[kind] for group in answers) for kind in ("equal", "refused", "wrong"))
        lost = each.get("damaged_segments", each.get("lost_segments"))
        said = f"{equal} answers equal, {refused} refused, {wrong} wrong"
        said += "" if lost is None else f"; {lost} segments lost"
        rows.append((told, said, "0 wrong, 0 lost", not wrong and not lost))
    return rows


def _groups(value: Any) -> list[Found]:
    """Every object inside."""
    if not isinstance(value, dict):
        return []
    return [value, *(group for inner in value.values() for group in _groups(inner))]


def _fuzz(found: Found) -> list[Row]:
    sent, failed = found["generated"]["requests"], found["generated"]["server_errors"]
    rows: list[Row] = [(f"server errors in {sent} generated requests", str(len(failed)), "0", not failed)]
    rows += [(f"hostile by hand: {name}", said, "4xx", None) for name, said in found["written"].items()]
    return rows


def _rows(found: Found) -> list[Row]:
    rows: list[Row] = []
    for number, ratio in found["rows"].items():
        pause, prompt = ratio["pause_median_ratio"], ratio["prompt_seconds_ratio"]
        used = number == "measured"
        said = f"{pause:.1f} steps; the prompt takes {prompt:.2f} times as long"
        portion = "as many as fit a step" if used else number
        what = f"a stream's pause while {found['prompt_tokens']} tokens are read, {portion} at once"
        rows.append((what, said, "<= 2 steps" if used else "", pause <= 2 if used else None))
    return rows


_FAULTS = {
    "killed_in_compile": "kill -9 while documents compile",
    "killed_in_load": "kill -9 while clients stream",
    "full_disk": "a full disk",
    "valkey_restarts": "Valkey hangs, dies, comes back empty",
    "corrupted": "a bit flipped in half of the files",
}
_FILES: tuple[tuple[str, Callable[[Found], list[Row]]], ...] = (
    ("server-load-*.json", _load), ("server-overhead-*.json", _overhead), ("server-reuse-*.json", _reuse),
    ("server-faults-*.json", _faults), ("server-fuzz-*.json", _fuzz), ("shared-rows-*.json", _rows),
)  # fmt: skip
