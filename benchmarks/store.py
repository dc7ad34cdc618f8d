"""How fast the store reads, finds and opens; ratios within one run, medians of several.

    python benchmarks/store.py --json OUT

Bars: reading >= 0.70 of the bandwidth of plain file reads of the same bytes; with 10,000 segments, look-up p99 < 5 ms
and opening < 1 s. The page cache is warm throughout; `first` reads verify the checksum, `second` ones need not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvquilt.identity import SegmentKey, segment_key
from kvquilt.segment import CompiledSegment
from kvquilt.store import DiskTier, Hit, Store

LAYERS, KV_HEADS, HEAD_DIM, TOKENS, SEGMENTS = 30, 3, 64, 256, 16  # SmolLM2-135M
SMALL_SEGMENTS = 10_000


def make_segment(seed: int, tokens: int, layers: int = LAYERS) -> CompiledSegment:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 49152, (tokens,), generator=generator).tolist()
    keys, values = torch.randn(2, layers, KV_HEADS, tokens, HEAD_DIM, generator=generator).bfloat16()
    return CompiledSegment((seed, *ids[1:]), keys, values)


def key_of(segment: CompiledSegment) -> SegmentKey:
    return segment_key("fingerprint", "writer", None, segment.ids)


def median(measure: Callable[[], float], repeats: int) -> float:
    return statistics.median(measure() for _ in range(repeats))


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def read_through(tier: DiskTier, wanted: list[tuple[SegmentKey, tuple[int, ...]]]) -> list[CompiledSegment]:
    answers = [tier.get(key, ids) for key, ids in wanted]
    segments = [answer.segment for answer in answers if isinstance(answer, Hit)]
    if len(segments) != len(wanted):
        raise SystemExit("a stored segment was not found")
    return segments


def bandwidth(root: Path, repeats: int) -> dict[str, Any]:
    segments = [make_segment(seed, TOKENS) for seed in range(SEGMENTS)]
    wanted = [(key_of(segment), segment.ids) for segment in segments]
    writer = DiskTier(root)
    put_seconds = [timed(partial(writer.put, key_of(segment), segment)) for segment in segments]
    paths = [writer.files.path(key) for key, _ in wanted]
    writer.close()
    size = sum(path.stat().st_size for path in paths)
    # where a model reads from: one preallocated place, as the slot cache is
    place = bytearray(max(path.stat().st_size for path in paths))
    target = torch.empty(2, LAYERS, KV_HEADS, TOKENS, HEAD_DIM, dtype=torch.bfloat16)

    def plain() -> list[bytes]:
        return [path.read_bytes() for path in paths]

    def plain_into_place() -> None:
        for path in paths:
            with open(path, "rb", buffering=0) as handle:
                handle.readinto(place)

    def copy_out(found: list[CompiledSegment]) -> None:
        for segment in found:
            target[0].copy_(segment.keys)
            target[1].copy_(segment.values)

    def first() -> float:
        tier = DiskTier(root)
        seconds = timed(lambda: read_through(tier, wanted))
        tier.close()
        return seconds

    def second(use: Callable[[list[CompiledSegment]], object]) -> float:
        tier = DiskTier(root)
        read_through(tier, wanted)
        seconds = timed(lambda: use(read_through(tier, wanted)))
        tier.close()
        return seconds

    plain()
    seconds = {
        "plain_read": median(lambda: timed(plain), repeats),
        "plain_readinto": median(lambda: timed(plain_into_place), repeats),
        "store_first": median(first, repeats),
        "store_second": median(lambda: second(lambda found: found), repeats),
        "store_second_copied": median(lambda: second(copy_out), repeats),
    }
    return {
        "bytes": size,
        "gigabytes_per_second": {name: size / value / 1e9 for name, value in seconds.items()},
        # a mapped read ends in memory of its own, as read() does; a copied one in a given place, as readinto() does
        "first_read_ratio": seconds["plain_read"] / seconds["store_first"],
        "first_read_ratio_to_readinto": seconds["plain_readinto"] / seconds["store_first"],
        "second_read_copied_ratio_to_readinto": seconds["plain_readinto"] / seconds["store_second_copied"],
        "put_ms_median": statistics.median(put_seconds) * 1e3,
    }


def many(root: Path, repeats: int) -> dict[str, Any]:
    template = make_segment(0, 4, layers=1)
    wanted = []
    with Store.open(root, 0) as store, mock.patch("os.fsync"):  # filling is not what is measured
        for number in range(SMALL_SEGMENTS):
            segment = CompiledSegment((number, 1, 2, 3), template.keys, template.values)
            wanted.append((key_of(segment), segment.ids))
            store.tiers[1].put(wanted[-1][0], segment)
    opening = []
    for _ in range(repeats):
        start = time.perf_counter()
        store = Store.open(root, 1 << 30)
        store.stats()
        opening.append(time.perf_counter() - start)
        store.close()
    report: dict[str, Any] = {"segments": SMALL_SEGMENTS, "open_ms_median": statistics.median(opening) * 1e3}
    with Store.open(root, 1 << 30) as store:
        for name in ("disk", "memory"):
            report[f"{name}_look_up"] = percentiles([look_up(store, each, name) for each in wanted])
        absent = [(segment_key("other", "writer", None, ids), ids) for _, ids in wanted]
        report["absent_look_up"] = percentiles([look_up(store, each, None) for each in absent])
        store.check_integrity()
    return report


def look_up(store: Store, wanted: tuple[SegmentKey, tuple[int, ...]], tier: str | None) -> float:
    start = time.perf_counter()
    with store.fetch([wanted]) as held:
        seconds = time.perf_counter() - start
        if held[0].tier != tier:
            raise SystemExit(f"expected {tier}, got {held[0].tier}")
    return seconds


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": ordered[len(ordered) // 2] * 1e3,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
        "max_ms": ordered[-1] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    root = Path(tempfile.mkdtemp(prefix="kvquilt-bench-"))
    try:
        read, found = bandwidth(root / "large", options.repeats), many(root / "many", options.repeats)
    finally:
        shutil.rmtree(root)
    result = {
        "command": " ".join(["python", "benchmarks/store.py", *sys.argv[1:]]),
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "bandwidth": read,
        "many_segments": found,
        "bars": {
            "read_ratio >= 0.70": read["first_read_ratio"] >= 0.70,
            "look-up p99 < 5 ms": max(found["disk_look_up"]["p99_ms"], found["absent_look_up"]["p99_ms"]) < 5,
            "open < 1 s": found["open_ms_median"] < 1000,
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
