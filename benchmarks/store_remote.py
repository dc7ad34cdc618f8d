"""What a remote tier gives and costs: a segment that is read against one that is compiled, and a look-up in vain.

    python benchmarks/store_remote.py --remote valkey://127.0.0.1:6379/0 [--remote s3://...] --json OUT

The remote is emptied of what this script wrote. Segments are as large as SmolLM2-135M's of 256 tokens; compiling is
measured with `--model`, storing on disk included. `hit_over_compile` is the time to read a prompt's segments from the
remote, over the time to compile them: below 1 the remote helps. Ratios within one run, medians of several; the seconds
are this machine's, and on a loopback the network's share is left out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from store import key_of, make_segment, percentiles

from kvquilt.bench import environment, portable
from kvquilt.engine import Engine
from kvquilt.prompt import Document
from kvquilt.remote import Remote
from kvquilt.store import DiskTier, Hit, RemoteTier, Stored, Tier
from kvquilt.store.remote import open_remote

TOKENS, SEGMENTS, ABSENT = 256, 8, 200


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def compile_seconds(model: str, threads: int | None) -> float:
    """Seconds to compile a prompt's segments."""
    texts = sorted(topics.values(), key=len, reverse=True)[: SEGMENTS + 1]
    with tempfile.TemporaryDirectory() as folder, Engine.load(model, store_dir=folder, threads=threads) as engine:
        spoken = engine.model.tokenizer
        documents = [Document(spoken.decode(spoken.encode(text)[:TOKENS]), str(i)) for i, text in enumerate(texts)]
        engine.compile(documents[:1], gate=False)  # warms kernels
        report = engine.compile(documents[1:], gate=False)
        return report.seconds / report.tokens * TOKENS * SEGMENTS


def reads(tier: Tier, repeats: int) -> float:
    """Median seconds to read all segments at once."""
    asked = [(key_of(each), each.ids, None) for each in map(segment, range(SEGMENTS))]

    def read() -> None:
        if not all(isinstance(answer, Hit) for answer in tier.get_many(asked)):
            raise SystemExit(f"{tier.name}: a stored segment was not found: {tier.stats()}")

    return statistics.median(timed(read) for _ in range(repeats))


def segment(number: int) -> Any:
    return make_segment(number, TOKENS)


def measure(tier: RemoteTier, repeats: int, compiling: float) -> dict[str, Any]:
    segments = [segment(number) for number in range(SEGMENTS)]
    try:
        accepted = [timed(lambda each=each: tier.put(key_of(each), each)) for each in segments]
        flushed = timed(tier.flush)
        if tier.stats().failures:
            raise SystemExit(f"{tier.place}: {dict(tier.stats().failures)}")
        seconds = reads(tier, repeats)
        absent = [make_segment(10_000 + number, 1, layers=1) for number in range(ABSENT)]
        misses = [timed(lambda each=each: tier.get(key_of(each), each.ids)) for each in absent]
    finally:
        for each in segments:
            tier.remove(key_of(each))
    return {
        "place": tier.place.partition("?")[0],
        "hit_seconds": seconds,
        "hit_over_compile": seconds / compiling,
        "megabytes_per_second": sum(each.nbytes for each in segments) / seconds / 1e6,
        "miss": percentiles(misses),
        "miss_over_compile_of_one": statistics.median(misses) / (compiling / SEGMENTS),
        "put_returns_ms": statistics.median(accepted) * 1e3,
        "written_after_ms": flushed * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remote", action="append", required=True, help="URL of a server to measure; repeatable")
    parser.add_argument("--model", default="smollm2", help="what compiles")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    remotes = {url: Remote.parse(url) for url in options.remote}
    compiling = compile_seconds(options.model, options.threads)
    said = [str(remotes[each]) if each in remotes else portable(each) for each in sys.argv[1:]]
    result: dict[str, Any] = {
        **environment(),
        "command": shlex.join([Path(sys.argv[0]).name, *said]),  # without passwords
        "tokens": TOKENS,
        "segments": SEGMENTS,
        "compile_seconds": compiling,
    }
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskTier(Path(folder))
        for number in range(SEGMENTS):
            if not isinstance(disk.put(key_of(segment(number)), segment(number)), Stored):
                raise SystemExit("the disk tier refused a segment")
        result["disk_hit_over_compile"] = reads(disk, options.repeats) / compiling
        disk.close()
    for remote in remotes.values():
        tier = open_remote(remote)
        try:
            result[tier.name] = measure(tier, options.repeats, compiling)
        finally:
            tier.close()
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
